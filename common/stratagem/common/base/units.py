"""Parse durations and amounts of bytes as people write them in settings: 30s, 10m, 8GB, 512MiB."""

import re
from typing import Annotated, Final

from pydantic import BeforeValidator, Field

from stratagem.common.base.errors import InvalidInputError

# ---- Durations ----

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?) *([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(value: object) -> object:
    """Convert a duration such as "7d" to seconds; numbers are returned as they are."""
    if not isinstance(value, str):
        return value
    match_ = _SPAN.fullmatch(value.strip())
    if match_ is None:
        raise ValueError(f"{value!r} is not a span of time, such as 30s, 10m, 12h or 7d")
    number, unit = match_.groups()
    return float(number) * _SECONDS[unit]


Span = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]
"""The pydantic type of a setting in seconds that people write with a unit, such as "30s"."""


# ---- Sizes ----

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def size_bytes(text: str, where: str) -> int:
    """Parse a size, "8GB" (powers of 1000), "512MiB" (of 1024) or a bare number, of at least 1
    byte. Raises InvalidInputError at `where`."""
    read = _SIZE.fullmatch(text.strip())
    if read is None:
        raise InvalidInputError.at(where, f"{text!r} is no size such as 8GB or 512MiB")
    unit = (read[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    size = int(float(read[1]) * base ** _POWERS[unit.removesuffix("i")])
    if size < 1:
        raise InvalidInputError.at(where, f"{text} is not allowed; must be > 0")
    return size
