"""Rounds of a federation: loss, clients by what became of them, and time against the deadline."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.client.pictures.drawing.frame import (
    EDGE,
    Box,
    below,
    box_sign,
    legend,
    line_sign,
    x_values,
    y_grid,
)
from stratagem.client.pictures.drawing.scales import Axis, axis_of, duration, short, whole_steps
from stratagem.client.pictures.drawing.svg import SMALL, element, hint, label, path_of
from stratagem.client.pictures.picture import NumberTable, Picture, thinned

COLOURS = {"done": "good", "late": "warn", "rejected": "bad", "selected": "grid"}
"""Of the parts of a bar, from the bottom up."""
MIN_PIXELS = 2.0
"""That a column takes; where there is less room for a round, several are drawn as one."""


@dataclass(frozen=True, slots=True)
class RoundBar:
    """One round as it is shown."""

    number: int
    loss: float
    counts: dict[str, int]
    """Clients by state."""
    num_needed: int | None = None
    seconds: float | None = None
    """None: it is open."""
    deadline: float | None = None
    """Seconds after its beginning."""


def rounds(bars: Sequence[RoundBar], *, title: str, width: int = 720) -> Picture:
    """Return three plots above each other with one axis of rounds.

    Of more rounds than there is room for, several share a column: of losses it has the last one and
    their range, of clients the mean number, of times the longest.
    """
    present = [state for state in COLOURS if any(bar.counts.get(state) for bar in bars)]
    signs = [(line_sign("s1"), "loss")]
    signs += [(box_sign(COLOURS[state]), state) for state in present]
    if any(bar.num_needed is not None for bar in bars):
        signs.append((_dashes("ink"), "needed to close"))
    signs.append((box_sign("s6"), "time"))
    if any(bar.deadline is not None for bar in bars):
        signs.append((_dashes("bad"), "deadline"))
    shown, top = legend(signs, 52, width)
    first, last = (bars[0].number, bars[-1].number) if bars else (1, 1)
    left, right = 52.0, float(width - EDGE)
    x = Axis(first - 0.5, last + 0.5, left, right)
    boxes = [Box(left, top + a, right, top + b) for a, b in ((10, 110), (134, 214), (238, 298))]
    columns = _columns(bars, math.ceil(len(bars) * MIN_PIXELS / (right - left)))
    parts = [shown, *_losses(columns, x, boxes[0]), *_clients(columns, x, boxes[1])]
    parts += _times(columns, x, boxes[2])
    count = max(2, round((right - left) / 80))
    parts += x_values(x, boxes[2], whole_steps(first, last, count), "round")
    rows = [
        (
            *(str(bar.number), short(bar.loss) if math.isfinite(bar.loss) else ""),
            *(str(bar.counts.get(state, 0)) for state in ("done", "late", "rejected")),
            "all" if bar.num_needed is None else str(bar.num_needed),
            "open" if bar.seconds is None else duration(bar.seconds),
            "" if bar.deadline is None else duration(bar.deadline),
        )
        for bar in bars
    ]
    headings = ("round", "loss", "done", "late", "rejected", "needed", "time", "deadline")
    table = NumberTable(headings, thinned(rows))
    return Picture(title, _words(bars), width, top + 300 + below("round"), "".join(parts), table)


def _words(bars: Sequence[RoundBar]) -> str:
    totals = {state: sum(bar.counts.get(state, 0) for bar in bars) for state in COLOURS}
    told = ", ".join(f"{count} {state}" for state, count in totals.items() if count)
    finite = [bar for bar in bars if math.isfinite(bar.loss)]
    ends = f"; loss from {short(finite[0].loss)} to {short(finite[-1].loss)}" if finite else ""
    return f"{len(bars)} rounds: {told or 'no client so far'}{ends}"


def _dashes(colour: str) -> str:
    return element(
        *("line",),
        x1=-5,
        x2=6,
        y1=0,
        y2=0,
        stroke=colour,
        stroke_width=1.6,
        stroke_dasharray="3 2",
    )


def _named(box: Box, name: str) -> str:
    return label(box.left, box.top - 6, name, fill="muted", size=SMALL + 1)


@dataclass(frozen=True, slots=True)
class _Column:
    """The rounds that are drawn in one place."""

    number: float
    name: str
    loss: float
    """Of the last one."""
    low: float
    high: float
    counts: dict[str, float]
    """Clients by state, of one round in the mean."""
    num_needed: int | None
    """The greatest one, as those that follow."""
    seconds: float | None
    deadline: float | None


def _columns(bars: Sequence[RoundBar], size: int) -> list[_Column]:
    """Return the rounds, so many in each column."""
    return [_column(bars[at : at + size]) for at in range(0, len(bars), max(size, 1))]


def _column(bars: Sequence[RoundBar]) -> _Column:
    first, last = bars[0].number, bars[-1].number
    losses = [bar.loss for bar in bars if math.isfinite(bar.loss)] or [math.nan]
    counts = {state: sum(bar.counts.get(state, 0) for bar in bars) for state in COLOURS}
    return _Column(
        (first + last) / 2,
        f"round {first}" if len(bars) == 1 else f"rounds {first} to {last}",
        *(losses[-1], min(losses), max(losses)),
        {state: count / len(bars) for state, count in counts.items()},
        max((bar.num_needed for bar in bars if bar.num_needed is not None), default=None),
        max((bar.seconds for bar in bars if bar.seconds is not None), default=None),
        max((bar.deadline for bar in bars if bar.deadline is not None), default=None),
    )


def _losses(columns: Sequence[_Column], x: Axis, box: Box) -> Iterator[str]:
    finite = [each for each in columns if math.isfinite(each.loss)]
    y = axis_of([v for each in finite for v in (each.low, each.high)], box.bottom, box.top)
    yield from y_grid(y, box, count=3)
    if any(each.high > each.low for each in finite):
        outline = [(x(each.number), y(each.high)) for each in finite]
        outline += [(x(each.number), y(each.low)) for each in reversed(finite)]
        yield element("path", d=f"{path_of(outline)}Z", fill="s1", fill_opacity="0.20")
    line = path_of([(x(each.number), y(each.loss)) for each in finite])
    yield element("path", d=line, fill="none", stroke="s1", stroke_width=1.8)
    if len(finite) <= 120:
        for each in finite:
            text = hint(f"{each.name}: loss {short(each.loss)}")
            yield element("circle", text, cx=x(each.number), cy=y(each.loss), r=2.8, fill="s1")


def _clients(columns: Sequence[_Column], x: Axis, box: Box) -> Iterator[str]:
    yield _named(box, "clients")
    most = max((max(sum(c.counts.values()), c.num_needed or 0) for c in columns), default=1)
    y = Axis(0.0, max(most, 1) * 1.05, box.bottom, box.top)
    for value in whole_steps(0, most, 3):
        yield element("line", x1=box.left, x2=box.right, y1=y(value), y2=y(value), stroke="grid")
        shown: dict[str, Any] = {"fill": "muted", "anchor": "end", "size": SMALL + 1}
        yield label(box.left - 6, y(value) + 4, short(value), **shown)
    wide = _wide(x, len(columns))
    for column in columns:
        below = 0.0
        for state, colour in COLOURS.items():
            count = column.counts.get(state, 0)
            if count:
                top, bottom = y(below + count), y(below)
                shape: dict[str, Any] = {"x": x(column.number) - wide / 2, "y": top, "width": wide}
                text = hint(f"{column.name}: {short(count)} {state}")
                high = max(bottom - top - 0.6, 0.6)
                yield element("rect", text, **shape, height=high, fill=colour)
            below += count
        if column.num_needed is not None:
            text_of = f"{column.num_needed} needed"
            yield _tick(x(column.number), y(column.num_needed), wide, "ink", text_of)


def _times(columns: Sequence[_Column], x: Axis, box: Box) -> Iterator[str]:
    yield _named(box, "time of a round")
    values = [v for each in columns for v in (each.seconds, each.deadline) if v is not None]
    y = Axis(0.0, max(values, default=1.0) * 1.08 or 1.0, box.bottom, box.top)
    yield from y_grid(y, box, count=2, form=duration)
    wide = _wide(x, len(columns))
    for column in columns:
        if column.seconds is not None:
            top = y(column.seconds)
            text = hint(f"{column.name}: {duration(column.seconds)}")
            shape: dict[str, Any] = {"x": x(column.number) - wide / 2, "y": top, "width": wide}
            high = max(box.bottom - top, 0.6)
            yield element("rect", text, **shape, height=high, fill="s6", fill_opacity="0.75")
        if column.deadline is not None:
            text_of = f"deadline {duration(column.deadline)}"
            yield _tick(x(column.number), y(column.deadline), wide, "bad", text_of)


def _wide(x: Axis, num_columns: int) -> float:
    return min(max((x.end - x.start) / max(num_columns, 1) * 0.72, 0.8), 34.0)


def _tick(x: float, y: float, wide: float, colour: str, text: str) -> str:
    half = wide / 2 + min(wide * 0.15, 3)
    return element(
        *("line", hint(text)),
        x1=x - half,
        x2=x + half,
        y1=y,
        y2=y,
        stroke=colour,
        stroke_width=1.6,
        stroke_dasharray="3 2",
    )
