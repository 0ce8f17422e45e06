"""Draw curves over steps: a line of last values in a band from minimum to maximum, with marks of
events."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from stratagem.client.pictures.axes import (
    EDGE,
    Axis,
    Box,
    axis_of,
    below,
    dot_sign,
    legend,
    line_sign,
    short,
    triangle,
    usual_range,
    whole_steps,
    x_values,
    y_grid,
)
from stratagem.client.pictures.svg import (
    NumberTable,
    Picture,
    decimal,
    element,
    hint,
    path_of,
    series_colour,
    within,
)

# ---- Rows ----
#
# The rows of a series are merged where several share a column of pixels.


@dataclass(frozen=True, slots=True)
class Line:
    """One series to draw. A row stands for all steps after the previous row, up to its own step."""

    name: str
    step: Sequence[float]
    last: Sequence[float]
    low: Sequence[float] = ()
    """The minimum of each row; as long as `step`, or empty if each row is one value."""
    high: Sequence[float] = ()
    provisional_from: float = math.inf
    """The step after which rows may still change, so they are drawn paler."""
    dots: bool = False
    """Draw each value as a dot on a thin line, because there are few values."""
    colour: int | None = None
    """The index of the series colour; by default the index of the line in its picture."""


def cut(line: Line, first: float, last: float) -> Line:
    """Return the rows of a line between two steps."""
    at = slice(bisect_left(line.step, first), bisect_right(line.step, last))
    low, high = line.low[at], line.high[at]
    return replace(line, step=line.step[at], last=line.last[at], low=low, high=high)


@dataclass(frozen=True, slots=True)
class Row:
    """The values to draw for one row of a line, or for rows merged into one pixel column."""

    step: float
    last: float
    low: float
    high: float


def rows_of(line: Line) -> list[Row]:
    """Convert a line to rows, to be merged and drawn."""
    steps, last = list(map(float, line.step)), list(map(float, line.last))
    low, high = (list(map(float, column)) or last for column in (line.low, line.high))
    return [Row(*values) for values in zip(steps, last, low, high, strict=True)]


def merge_rows(rows: Sequence[Row], x: Axis, pixels: int = 1) -> list[Row]:
    """Merge the rows whose steps fall into the same column, `pixels` pixels wide."""
    merged: list[Row] = []
    column, was_finite = -1, False
    for row in rows:
        at, is_finite = int(x(row.step) / pixels), math.isfinite(row.last)
        if at == column and is_finite == was_finite:
            before = merged[-1]
            low = before.low if before.low <= row.low else _least(before.low, row.low)
            high = before.high if before.high >= row.high else -_least(-before.high, -row.high)
            merged[-1] = Row(row.step, row.last, low, high)
        else:
            merged.append(row)
        column, was_finite = at, is_finite
    return merged


def _least(a: float, b: float) -> float:
    if not math.isfinite(a):
        return b if math.isfinite(b) else math.nan
    return min(a, b) if math.isfinite(b) else a


# ---- Curves ----

MAX_TABLE_ROWS = 40
DOT_PIXELS = 9
"""The width of a dot with its margin; of dots that are closer, only the last is drawn."""
OUTLIER_PIXELS = 12


class MarkKind(StrEnum):
    """The kind of event that a mark on the curves stands for."""

    DEATH = "death"
    JOIN = "join"


@dataclass(frozen=True, slots=True)
class CurveMark:
    """A mark on the curves for an event at a step."""

    step: float
    kind: MarkKind
    text: str


def curve(  # noqa: PLR0913  (the options of a curve)
    lines: Sequence[Line],
    marks: Sequence[CurveMark] = (),
    *,
    title: str,
    unit: str = "step",
    width: int = 720,
    height: int = 260,
    log: bool = False,
    span: tuple[float, float] | None = None,
) -> Picture:
    """Draw lines in one frame. unit: the unit of the horizontal axis. span: the first and the last
    step of the frame, by default those of the lines.

    Rows in one column of pixels are merged into one, which keeps their least and greatest value.
    The line breaks where a value is not finite. A few values far from the others do not determine
    the scale: they are marked at the edge.
    """
    entries = [
        (dot_sign(colour) if line.dots else line_sign(colour), line.name)
        for line, colour in _coloured(lines)
    ]
    entries += [
        (triangle(0, 4 if kind is MarkKind.DEATH else -4, colour, up=kind is MarkKind.JOIN), name)
        for kind, colour, name in _KINDS
        if any(mark.kind is kind for mark in marks)
    ]
    legend_text, top = legend(entries, 52, width)
    box = Box(52, top + 6, width - EDGE, height - below(unit))
    rows = [rows_of(line) for line in lines]
    every = [row for of_line in rows for row in of_line]
    x = Axis(*(span or _span(every, marks)), box.left, box.right)
    y = axis_of(_shown_values(rows, log=log), box.bottom, box.top, log=log)
    drawn = [
        merge_rows(of_line, x, DOT_PIXELS if line.dots else 1)
        for line, of_line in zip(lines, rows, strict=True)
    ]
    parts = [legend_text, *y_grid(y, box, count=max(2, round((box.bottom - box.top) / 44)))]
    for (line, colour), of_line in zip(_coloured(lines), drawn, strict=True):
        parts += _drawn(line, of_line, colour, x, y)
        parts += _not_finite(of_line, x, box)
        parts += _outliers(line, of_line, colour, x, y)
    parts += [_mark(mark, x, box) for mark in marks]
    count = max(2, round((box.right - box.left) / 90))
    parts += x_values(x, box, whole_steps(x.low, x.high, count), unit)
    words = "; ".join(_words(lines, rows, marks, y, unit)) or "no value so far"
    table = _table(lines, rows, unit)
    steps = (x.low, x.high, x.start, x.end)
    return Picture(title, words, width, height, "".join(parts), table, steps)


def _shown_values(rows: Sequence[Sequence[Row]], *, log: bool) -> Iterator[float]:
    """Yield the values that the vertical scale must cover; outliers of a line are clipped."""
    for of_line in rows:
        ends = (-math.inf, math.inf) if log else usual_range([row.last for row in of_line])
        for row in of_line:
            for value in (row.low, row.high):
                yield value if math.isnan(value) else min(max(value, ends[0]), ends[1])


_KINDS = (
    (MarkKind.DEATH, "bad", "worker lost"),
    (MarkKind.JOIN, "good", "worker joined"),
)


def _coloured(lines: Sequence[Line]) -> Iterator[tuple[Line, str]]:
    for at, line in enumerate(lines):
        yield line, series_colour(at if line.colour is None else line.colour)


def _span(rows: Sequence[Row], marks: Sequence[CurveMark]) -> tuple[float, float]:
    steps = [row.step for row in rows] + [mark.step for mark in marks]
    first, last = min(steps, default=0.0), max(steps, default=1.0)
    # The first row stands for what came before it, too.
    return (0.0 if first <= (last - first) * 0.2 else first), max(last, first + 1e-9)


def _drawn(line: Line, rows: Sequence[Row], colour: str, x: Axis, y: Axis) -> Iterator[str]:
    """Yield the SVG of one series: band, line and dots."""
    for stretch in _stretches(rows, y, line.provisional_from):
        pale = stretch[-1].step > line.provisional_from
        opacity = 0.45 if pale else None
        if any(row.high > row.low for row in stretch):
            outline = [(x(row.step), y(row.high)) for row in stretch]
            outline += [(x(row.step), y(row.low)) for row in reversed(stretch)]
            path = f"{path_of(outline)}Z"
            share = 0.1 if pale else 0.2
            # Its edge keeps a spike of one step visible.
            edge: dict[str, Any] = {
                "stroke": colour,
                "stroke_width": 1.0,
                "stroke_opacity": f"{share:.2f}",
            }
            yield element("path", d=path, fill=colour, fill_opacity=f"{share:.2f}", **edge)
        points = [(x(row.step), y.beyond(row.last)) for row in stretch]
        parts = [points] if len(points) == 1 else within(points, y.end, y.start)
        data = "".join(map(path_of, parts)) + ("h0" if len(points) == 1 else "")
        shape: dict[str, Any] = {
            "stroke_width": 1.2 if line.dots else 1.8,
            "stroke_opacity": "0.45" if line.dots or pale else None,
        }
        joins: dict[str, Any] = {"stroke_linejoin": "round", "stroke_linecap": "round"}
        yield element("path", d=data, fill="none", stroke=colour, **joins, **shape)
        if line.dots:
            for row in stretch:
                text = hint(f"{line.name} {short(row.last)} at {short(row.step)}")
                style: dict[str, Any] = {"fill_opacity": opacity and str(opacity)}
                centre: dict[str, Any] = {"cx": x(row.step), "cy": y(row.last)}
                yield element("circle", text, **centre, r=3.2, fill=colour, **style)


def _stretches(rows: Sequence[Row], y: Axis, provisional_from: float) -> Iterator[list[Row]]:
    """Yield the parts of a line to draw without a break: it breaks at values that the scale cannot
    show, and where provisional rows begin."""
    stretch: list[Row] = []
    for row in rows:
        if math.isfinite(row.last) and (row.last > 0 or not y.log):
            if stretch and stretch[-1].step <= provisional_from < row.step:
                yield stretch
                stretch = stretch[-1:]
            stretch.append(row)
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _not_finite(rows: Sequence[Row], x: Axis, box: Box) -> Iterator[str]:
    for row in rows:
        if not math.isfinite(row.last):
            at, up = x(row.step), box.bottom - 6
            data = (
                f"M{decimal(at - 3)} {decimal(up - 3)}l6 6M{decimal(at - 3)} {decimal(up + 3)}l6 -6"
            )
            text = hint(f"not finite at {short(row.step)}")
            yield element("path", text, d=data, stroke="bad", stroke_width=1.6, fill="none")


def _outliers(line: Line, rows: Sequence[Row], colour: str, x: Axis, y: Axis) -> Iterator[str]:
    """Yield signs at the plot's edge for values beyond the scale; close ones share a sign."""
    last_at = {True: -math.inf, False: -math.inf}
    for row in rows:
        for value, above in ((row.high, True), (row.low, False)):
            at, is_beyond = x(row.step), value > y.high if above else value < y.low
            if is_beyond and at - last_at[above] >= OUTLIER_PIXELS and (value > 0 or not y.log):
                last_at[above] = at
                text = f"{line.name} {short(value)} at {short(row.step)}"
                # At the lower edge red triangles are workers that were lost, so it points down.
                yield triangle(at, y.end + 1 if above else y.start - 1, colour, text, up=above)


def _mark(mark: CurveMark, x: Axis, box: Box) -> str:
    at, death = x(mark.step), mark.kind is MarkKind.DEATH
    colour = "bad" if death else "good"
    line = element(
        *("line",),
        x1=at,
        x2=at,
        y1=box.top,
        y2=box.bottom,
        stroke=colour,
        stroke_opacity="0.35",
        stroke_dasharray="2 3",
    )
    tip = box.top + 8 if death else box.bottom - 8
    return line + triangle(at, tip, colour, mark.text, up=not death)


def _words(
    lines: Sequence[Line],
    rows: Sequence[Sequence[Row]],
    marks: Sequence[CurveMark],
    y: Axis,
    unit: str,
) -> Iterator[str]:
    """Yield the sentences of the picture's text description."""
    for line, of_line in zip(lines, rows, strict=True):
        finite = [row for row in of_line if math.isfinite(row.last)]
        if finite:
            first, last = finite[0], finite[-1]
            ends = f"from {short(first.last)} at {unit} {short(first.step)}"
            yield f"{line.name} {ends} to {short(last.last)} at {unit} {short(last.step)}"
            most, least = (
                max(finite, key=lambda row: row.high),
                min(finite, key=lambda row: row.low),
            )
            if most.high > y.high:
                yield f"above the frame up to {short(most.high)} at {unit} {short(most.step)}"
            if least.low < y.low and not y.log:
                yield f"below the frame down to {short(least.low)} at {unit} {short(least.step)}"
        elif of_line:
            yield f"{line.name} is not finite"
    yield from (f"{mark.text} at {unit} {short(mark.step)}" for mark in marks[:8])


def _table(lines: Sequence[Line], rows: Sequence[Sequence[Row]], unit: str) -> NumberTable:
    """Return the numbers of all lines as a table, with rows merged until they are few, which keeps
    their minimum and maximum."""
    columns = MAX_TABLE_ROWS - 1
    few = [merge_rows(of_line, Axis(*_span(of_line, ()), 0, columns)) for of_line in rows]
    has_band = any(row.high > row.low for of_line in few for row in of_line)
    headings = ("series", unit, "value", *(("least", "greatest") if has_band else ()))
    listed = [
        (
            *(line.name, short(row.step), short(row.last)),
            *((short(row.low), short(row.high)) if has_band else ()),
        )
        for line, of_line in zip(lines, few, strict=True)
        for row in of_line
    ]
    return NumberTable(headings, tuple(listed))
