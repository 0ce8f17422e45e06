"""Rounds of a federation: loss, clients by what became of them, and time against the deadline."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.client.pictures.drawing.frame import (
    Box,
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
    """Return three plots above each other with one axis of rounds."""
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
    left, right = 52.0, width - 14.0
    x = Axis(first - 0.5, last + 0.5, left, right)
    boxes = [Box(left, top + a, right, top + b) for a, b in ((10, 110), (134, 214), (238, 298))]
    parts = [shown, *_losses(bars, x, boxes[0]), *_clients(bars, x, boxes[1])]
    parts += _times(bars, x, boxes[2])
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
    return Picture(title, _words(bars), width, top + 324, "".join(parts), table)


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


def _losses(bars: Sequence[RoundBar], x: Axis, box: Box) -> Iterator[str]:
    y = axis_of([bar.loss for bar in bars], box.bottom, box.top)
    yield from y_grid(y, box, count=3)
    points = [(x(bar.number), y(bar.loss), bar) for bar in bars if math.isfinite(bar.loss)]
    line = path_of([(at, up) for at, up, _ in points])
    yield element("path", d=line, fill="none", stroke="s1", stroke_width=1.8)
    if len(points) <= 120:
        for at, up, bar in points:
            text = hint(f"round {bar.number}: loss {short(bar.loss)}")
            yield element("circle", text, cx=at, cy=up, r=2.8, fill="s1")


def _clients(bars: Sequence[RoundBar], x: Axis, box: Box) -> Iterator[str]:
    yield _named(box, "clients")
    most = max((max(sum(b.counts.values()), b.num_needed or 0) for b in bars), default=1)
    y = Axis(0.0, max(most, 1) * 1.05, box.bottom, box.top)
    for value in whole_steps(0, most, 3):
        yield element("line", x1=box.left, x2=box.right, y1=y(value), y2=y(value), stroke="grid")
        shown: dict[str, Any] = {"fill": "muted", "anchor": "end", "size": SMALL + 1}
        yield label(box.left - 6, y(value) + 4, short(value), **shown)
    wide = _wide(x)
    for bar in bars:
        below = 0
        for state, colour in COLOURS.items():
            count = bar.counts.get(state, 0)
            if count:
                top, bottom = y(below + count), y(below)
                shape: dict[str, Any] = {"x": x(bar.number) - wide / 2, "y": top, "width": wide}
                text = hint(f"round {bar.number}: {count} {state}")
                high = max(bottom - top - 0.6, 0.6)
                yield element("rect", text, **shape, height=high, fill=colour)
            below += count
        if bar.num_needed is not None:
            yield _tick(x(bar.number), y(bar.num_needed), wide, "ink", f"{bar.num_needed} needed")


def _times(bars: Sequence[RoundBar], x: Axis, box: Box) -> Iterator[str]:
    yield _named(box, "time of a round")
    values = [v for bar in bars for v in (bar.seconds, bar.deadline) if v is not None]
    y = Axis(0.0, max(values, default=1.0) * 1.08 or 1.0, box.bottom, box.top)
    yield from y_grid(y, box, count=2, form=duration)
    wide = _wide(x)
    for bar in bars:
        if bar.seconds is not None:
            top = y(bar.seconds)
            text = hint(f"round {bar.number}: {duration(bar.seconds)}")
            shape: dict[str, Any] = {"x": x(bar.number) - wide / 2, "y": top, "width": wide}
            high = max(box.bottom - top, 0.6)
            yield element("rect", text, **shape, height=high, fill="s6", fill_opacity="0.75")
        if bar.deadline is not None:
            text_of = f"deadline {duration(bar.deadline)}"
            yield _tick(x(bar.number), y(bar.deadline), wide, "bad", text_of)


def _wide(x: Axis) -> float:
    return min(max((x.end - x.start) / max(x.high - x.low, 1) * 0.72, 0.8), 34.0)


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
