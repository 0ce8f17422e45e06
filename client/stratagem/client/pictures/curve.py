"""Curves over steps: a line of last values in a band of minimum and maximum, and what happened."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stratagem.client.pictures.drawing.colours import series_colour
from stratagem.client.pictures.drawing.frame import (
    Box,
    dot_sign,
    legend,
    line_sign,
    triangle,
    x_values,
    y_grid,
)
from stratagem.client.pictures.drawing.scales import Axis, axis_of, short, whole_steps
from stratagem.client.pictures.drawing.svg import decimal, element, hint, path_of
from stratagem.client.pictures.picture import NumberTable, Picture

MAX_TABLE_ROWS = 40


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


class MarkKind(StrEnum):
    """What happened at a step, other than the step."""

    DEATH = "death"
    JOIN = "join"


@dataclass(frozen=True, slots=True)
class CurveMark:
    """Something that happened at a step."""

    step: float
    kind: MarkKind
    text: str


@dataclass(frozen=True, slots=True)
class _Row:
    step: float
    last: float
    low: float
    high: float


def curve(
    lines: Sequence[Line],
    marks: Sequence[CurveMark] = (),
    *,
    title: str,
    unit: str = "step",
    width: int = 720,
    height: int = 260,
    log: bool = False,
) -> Picture:
    """Return curves in one frame; unit: what is counted to the right.

    Rows of one pixel column are merged into one, which keeps their least and greatest value. Where
    a value is not finite the line breaks.
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
    shown, top = legend(entries, 52, width)
    box = Box(52, top + 6, width - 14, height - 24)
    rows = [_rows(line) for line in lines]
    every = [row for of_line in rows for row in of_line]
    x = Axis(*_span(every, marks), box.left, box.right)
    y = axis_of([v for row in every for v in (row.low, row.high)], box.bottom, box.top, log=log)
    merged = [_merged(of_line, x) for of_line in rows]
    parts = [shown, *y_grid(y, box, count=max(2, round((box.bottom - box.top) / 44)))]
    for (line, colour), of_line in zip(_coloured(lines), merged, strict=True):
        parts += _drawn(line, of_line, colour, x, y)
        parts += _not_finite(of_line, x, box)
    parts += [_mark(mark, x, box) for mark in marks]
    count = max(2, round((box.right - box.left) / 90))
    parts += x_values(x, box, whole_steps(x.low, x.high, count), unit)
    table = _table(lines, rows, unit)
    return Picture(title, _words(lines, rows, marks, unit), width, height, "".join(parts), table)


_KINDS = (
    (MarkKind.DEATH, "bad", "worker lost"),
    (MarkKind.JOIN, "good", "worker joined"),
)


def _coloured(lines: Sequence[Line]) -> Iterator[tuple[Line, str]]:
    return ((line, series_colour(at)) for at, line in enumerate(lines))


def _rows(line: Line) -> list[_Row]:
    steps, last = list(map(float, line.step)), list(map(float, line.last))
    low, high = (list(map(float, each)) or last for each in (line.low, line.high))
    return [_Row(*values) for values in zip(steps, last, low, high, strict=True)]


def _span(rows: Sequence[_Row], marks: Sequence[CurveMark]) -> tuple[float, float]:
    steps = [row.step for row in rows] + [mark.step for mark in marks]
    first, last = min(steps, default=0.0), max(steps, default=1.0)
    # The first row stands for what came before it, too.
    return (0.0 if first <= (last - first) * 0.2 else first), max(last, first + 1e-9)


def _merged(rows: Sequence[_Row], x: Axis) -> list[_Row]:
    """Merge the rows of each pixel column, in order."""
    merged: list[_Row] = []
    column = -1
    for row in rows:
        at = int(x(row.step))
        if at == column and math.isfinite(row.last) == math.isfinite(merged[-1].last):
            known = merged[-1]
            low, high = _least(known.low, row.low), -_least(-known.high, -row.high)
            merged[-1] = _Row(row.step, row.last, low, high)
        else:
            merged.append(row)
        column = at
    return merged


def _least(a: float, b: float) -> float:
    finite = [value for value in (a, b) if math.isfinite(value)]
    return min(finite, default=math.nan)


def _drawn(line: Line, rows: Sequence[_Row], colour: str, x: Axis, y: Axis) -> Iterator[str]:
    """Yield the band, the line, and the dots of one series."""
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
        points = [(x(row.step), y(row.last)) for row in stretch]
        data = path_of(points) + ("h0" if len(points) == 1 else "")
        shape: dict[str, Any] = {
            "stroke_width": 1.2 if line.dots else 1.8,
            "stroke_opacity": "0.45" if line.dots or pale else None,
        }
        joins: dict[str, Any] = {"stroke_linejoin": "round", "stroke_linecap": "round"}
        yield element("path", d=data, fill="none", stroke=colour, **joins, **shape)
        if line.dots:
            for row, (at, value) in zip(stretch, points, strict=True):
                text = hint(f"{line.name} {short(row.last)} at {short(row.step)}")
                known: dict[str, Any] = {"fill_opacity": opacity and str(opacity)}
                yield element("circle", text, cx=at, cy=value, r=3.2, fill=colour, **known)


def _stretches(rows: Sequence[_Row], y: Axis, provisional_from: float) -> Iterator[list[_Row]]:
    """Yield the parts of a line between values that cannot be shown; what may change by itself."""
    stretch: list[_Row] = []
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


def _not_finite(rows: Sequence[_Row], x: Axis, box: Box) -> Iterator[str]:
    for row in rows:
        if not math.isfinite(row.last):
            at, up = x(row.step), box.bottom - 6
            data = (
                f"M{decimal(at - 3)} {decimal(up - 3)}l6 6M{decimal(at - 3)} {decimal(up + 3)}l6 -6"
            )
            text = hint(f"not finite at {short(row.step)}")
            yield element("path", text, d=data, stroke="bad", stroke_width=1.6, fill="none")


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
    lines: Sequence[Line], rows: Sequence[Sequence[_Row]], marks: Sequence[CurveMark], unit: str
) -> str:
    """Return what the picture says."""
    parts: list[str] = []
    for line, of_line in zip(lines, rows, strict=True):
        finite = [row for row in of_line if math.isfinite(row.last)]
        if finite:
            first, last = finite[0], finite[-1]
            ends = f"from {short(first.last)} at {unit} {short(first.step)}"
            parts.append(f"{line.name} {ends} to {short(last.last)} at {unit} {short(last.step)}")
        elif of_line:
            parts.append(f"{line.name} is not finite")
    parts += [f"{mark.text} at {unit} {short(mark.step)}" for mark in marks[:8]]
    return "; ".join(parts) or "no value so far"


def _table(lines: Sequence[Line], rows: Sequence[Sequence[_Row]], unit: str) -> NumberTable:
    """Return the rows of all lines, merged until they are few: least and greatest values stay."""
    few = [_merged(of_line, Axis(*_span(of_line, ()), 0, MAX_TABLE_ROWS - 1)) for of_line in rows]
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
