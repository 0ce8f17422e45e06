"""Values of the client as plain JSON for the page: printable text, and numbers that JSON has."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from stratagem.common.base.text import printable


def plain(value: Any) -> Any:
    """Return a value as JSON can say it: what no number is becomes "nan", "inf" or "-inf"."""
    match value:
        case str():
            return printable(value)
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {printable(str(name), is_line=True): plain(each) for name, each in value.items()}
        case Iterable():
            return [plain(each) for each in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return plain(asdict(value))
        case _:
            return printable(str(value))


def as_json(value: Any) -> str:
    """Return a value as one line of JSON."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def server_sent(kind: str, value: Any, index: int | None = None) -> bytes:
    """Return one event of an event stream; index: its number, which the browser names when it
    comes back."""
    numbered = "" if index is None else f"id: {index}\n"
    return f"{numbered}event: {kind}\ndata: {as_json(value)}\n\n".encode()
