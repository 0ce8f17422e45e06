"""Convert values of the client to plain JSON for the page: printable text, and finite numbers."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Final

from stratagem.common.base.text import printable

# ---- Values ----


def plain(value: Any) -> Any:
    """Convert a value to JSON types; numbers that are not finite become "nan", "inf" or "-inf"."""
    match value:
        case str():
            return printable(value)
        case bool() | int() | None:
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {printable(str(name), is_line=True): plain(item) for name, item in value.items()}
        case Iterable():
            return [plain(item) for item in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return plain(asdict(value))
        case _:
            return printable(str(value))


def as_json(value: Any) -> str:
    """Encode a value as one line of JSON."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def server_sent(kind: str, value: Any, index: int | None = None) -> bytes:
    """Encode a server-sent event. index: its id, which the browser sends when it reconnects."""
    numbered = "" if index is None else f"id: {index}\n"
    return f"{numbered}event: {kind}\ndata: {as_json(value)}\n\n".encode()


# ---- View of curves ----
#
# A view says which steps of curves are shown, on which axis, and how many pictures stand side by
# side.

BETWEEN: Final = 54
"""The gap in pixels between pictures side by side; as in style.css."""


@dataclass(frozen=True, slots=True)
class CurveView:
    """The viewer's options for a page: range of steps, scale, and columns of its pictures."""

    first_step: int = 1
    last_step: int | None = None
    """The last step in view; None for the newest one."""
    log: bool = False
    columns: int = 1
    """The number of columns of pictures; the last of an odd number of pictures spans two."""

    def width_of(self, at: int, num_pictures: int, width: int) -> int:
        """Return the width of the picture at index `at` on a page of this width."""
        is_alone = self.columns == 2 and at == num_pictures - 1 and num_pictures % 2 == 1
        return 2 * width + BETWEEN if is_alone else width

    @property
    def is_part(self) -> bool:
        """Return whether the view may leave out steps."""
        return self.first_step > 1 or self.last_step is not None

    def steps(self, reached: int) -> tuple[float, float] | None:
        """Return (first, last) of the steps in view, given the runs' last step; None for all."""
        if not self.is_part:
            return None
        last = max(reached, 1) if self.last_step is None else self.last_step
        return float(self.first_step), float(max(last, self.first_step + 1))


WHOLE: Final = CurveView()
