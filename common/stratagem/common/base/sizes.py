"""Amounts of bytes as people write them: 8GB, 512MiB."""

import re
from typing import Final

from stratagem.common.base.errors import InvalidInputError

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def size_bytes(text: str, where: str) -> int:
    """Bytes of "8GB" (powers of 1000), "512MiB" (of 1024) or a bare number; at least 1.

    Raises InvalidInputError at `where`.
    """
    read = _SIZE.fullmatch(text.strip())
    if read is None:
        raise InvalidInputError.at(where, f"{text!r} is no size such as 8GB or 512MiB")
    unit = (read[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    size = int(float(read[1]) * base ** _POWERS[unit.removesuffix("i")])
    if size < 1:
        raise InvalidInputError.at(where, f"{text} is not allowed; must be > 0")
    return size
