"""Spans of time as people write them in settings: 30s, 10m, 12h, 7d."""

import re
from typing import Annotated, Final

from pydantic import BeforeValidator, Field

_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?) *([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(value: object) -> object:
    """Convert a span of time such as "7d" to seconds; a number is returned as it is."""
    if not isinstance(value, str):
        return value
    match_ = _SPAN.fullmatch(value.strip())
    if match_ is None:
        raise ValueError(f"{value!r} is not a span of time, such as 30s, 10m, 12h or 7d")
    number, unit = match_.groups()
    return float(number) * _SECONDS[unit]


Span = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]
"""A setting in seconds, given with its unit."""
