"""The rows of curves: those of a series, merged where several share a column of pixels."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stratagem.client.pictures.drawing.scales import Axis


@dataclass(frozen=True, slots=True)
class Line:
    """One series. A row stands for the steps after the row before it, up to its own."""

    name: str
    step: Sequence[float]
    last: Sequence[float]
    low: Sequence[float] = ()
    """The least value in each row; as long as `step`, or empty for rows of one value."""
    high: Sequence[float] = ()
    provisional_from: float = math.inf
    """Rows behind this step may still change, and are paler."""
    dots: bool = False
    """Its values are few: each is a dot, on a thin line."""
    colour: int | None = None
    """Its number among the colours of series; unless given, that of the line in its frame."""


def cut(line: Line, first: float, last: float) -> Line:
    """Return the rows of a series from one step to another."""
    at = slice(bisect_left(line.step, first), bisect_right(line.step, last))
    low, high = line.low[at], line.high[at]
    return replace(line, step=line.step[at], last=line.last[at], low=low, high=high)


@dataclass(frozen=True, slots=True)
class Row:
    """What is drawn of the steps of one row, or of several that share a column."""

    step: float
    last: float
    low: float
    high: float


def rows_of(line: Line) -> list[Row]:
    """Return the rows of a series."""
    steps, last = list(map(float, line.step)), list(map(float, line.last))
    low, high = (list(map(float, each)) or last for each in (line.low, line.high))
    return [Row(*values) for values in zip(steps, last, low, high, strict=True)]


def merged(rows: Sequence[Row], x: Axis, pixels: int = 1) -> list[Row]:
    """Merge the rows of each column of so many pixels, in order."""
    found: list[Row] = []
    column, was_finite = -1, False
    for row in rows:
        at, is_finite = int(x(row.step) / pixels), math.isfinite(row.last)
        if at == column and is_finite == was_finite:
            known = found[-1]
            low = known.low if known.low <= row.low else _least(known.low, row.low)
            high = known.high if known.high >= row.high else -_least(-known.high, -row.high)
            found[-1] = Row(row.step, row.last, low, high)
        else:
            found.append(row)
        column, was_finite = at, is_finite
    return found


def _least(a: float, b: float) -> float:
    if not math.isfinite(a):
        return b if math.isfinite(b) else math.nan
    return min(a, b) if math.isfinite(b) else a
