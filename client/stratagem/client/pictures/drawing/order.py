"""The order in which names are listed: their numbers count as numbers."""

import re
from typing import Final

_NUMBER: Final = re.compile(r"(\d{1,18})")


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """Return what names are ordered by: worker-2 before worker-10, member1/client2 before
    member1/client10."""
    parts = _NUMBER.split(name)
    return tuple(
        (parts[at], int(parts[at + 1]) if at + 1 < len(parts) else -1)
        for at in range(0, len(parts), 2)
    )
