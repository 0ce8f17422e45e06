"""Numbers and values as sentences say them, of the coordinator and of the command line alike."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

MAX_VALUES_CHARS: Final = 300
MAX_DIGITS: Final = 17
"""With as many every float is written as itself."""


def counted(count: int, noun: str) -> str:
    """ "1 client", "3 clients", "1,000 clients"; for nouns that take an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def beyond_text(value: float, limit: float) -> str:
    """ "4.25"; "4.001" beside a limit of 4, which fewer digits would not be beyond."""
    texts = (f"{value:.{digits}g}" for digits in range(3, MAX_DIGITS + 1))
    return next((text for text in texts if float(text) > limit), f"{value:.3g}")


def values_text(values: Mapping[str, Any]) -> str:
    """ "optimizer.lr 0.0213, optimizer.name sgd", of bounded length: hyperparameters by name."""
    text = ", ".join(f"{name} {_value_text(value)}" for name, value in values.items())
    return text if len(text) <= MAX_VALUES_CHARS else f"{text[: MAX_VALUES_CHARS - 1]}…"


def _value_text(value: Any) -> str:
    match value:
        case str():
            return value
        case float():
            return f"{value:.6g}"
        case _:
            return json.dumps(value)


def plainly(error: Exception) -> str:
    """Return the message of a library's error without its link to further documentation."""
    return re.sub(r" *See https?://\S+ for more details\.", "", str(error))
