"""How a coordinator says that it follows something, before there is any news to send.

Without it a caller cannot tell a stream that is quiet from one that nobody has taken. Coordinators
of 0.2.0 do not say so.
"""

from collections.abc import Iterable
from typing import Final

BEGUN: Final = (("stratagem-stream", "begun"),)
"""The initial metadata that say so; gRPC itself gives empty ones for a call that has failed."""


def has_begun(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Return whether initial metadata say so."""
    return set(BEGUN) <= {(key, value) for key, value in metadata or ()}
