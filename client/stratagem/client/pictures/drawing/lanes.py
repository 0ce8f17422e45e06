"""Lanes of bars over time: what time lines, members and pipelines are drawn with."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stratagem.client.pictures.drawing.frame import EDGE, Box, below, legend, x_values
from stratagem.client.pictures.drawing.scales import Axis, duration, time_steps
from stratagem.client.pictures.drawing.svg import (
    SMALL,
    decimal,
    element,
    hint,
    label,
    shortened,
    width_of,
)

LANE_HEIGHT = 24
MAX_LANES_HEIGHT = 720
"""In pixels, of all lanes; of more than 30 each one is less high."""
MIN_LANE_HEIGHT = 2.0
MAX_ROWS = 1000
"""Of a picture; where there are more lanes, several share a row."""
MIN_NAME_HEIGHT = 13.0
MAX_NAME = 150.0
MAX_BARS = 400
"""Elements that a browser reads and draws without its user noticing."""
THIN_PIXELS = 2
"""The least that is drawn of a bar. Of more than MAX_BARS, bars of up to twice that share one
element in each lane and colour, and those in one column of so many pixels are one."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time in a lane; as long as nothing, a mark."""

    lane: int
    start: float
    end: float
    colour: str
    text: str
    """What it is, for who rests the pointer on it."""
    inside: str = ""
    """What is written in it, where there is room."""
    ending: str = ""
    """A sign at its end, such as ✕."""
    count: int = 1


def merged(bars: Sequence[Bar], x: Axis) -> list[Bar]:
    """Return the bars, those of a lane and a colour in one that are too narrow to be told apart.

    However many there are, no more are left than a lane has pixel columns.
    """
    pixel = (x.high - x.low) / (x.end - x.start)
    open_: dict[tuple[int, str], Bar] = {}
    done: list[Bar] = []
    for bar in sorted(bars, key=lambda each: (each.start, each.end)):
        key = bar.lane, bar.colour
        before = open_.get(key)
        if before is not None and _is_one(before, bar, pixel):
            end, count = max(before.end, bar.end), before.count + bar.count
            open_[key] = Bar(
                *(bar.lane, before.start, end, bar.colour, before.text, "", bar.ending, count)
            )
            continue
        if before is not None:
            done.append(before)
        open_[key] = bar
    return sorted([*done, *open_.values()], key=lambda each: (each.lane, each.start, each.end))


def _is_one(before: Bar, bar: Bar, pixel: float) -> bool:
    """Return whether two bars are too close, and one too narrow, to be told apart; or one lies on
    the other."""
    if before.ending or bar.start - before.end >= pixel:
        return False
    is_covered = bar.end - before.end < pixel or bar.start - before.start < pixel
    return is_covered or min(bar.end - bar.start, before.end - before.start) < 3 * pixel


def _told_apart(bars: Sequence[Bar], x: Axis) -> tuple[list[Bar], list[list[Bar]]]:
    """Return the bars that are drawn alone, and thin ones by lane and colour where all are many."""
    wide: list[Bar] = []
    thin: dict[tuple[int, str], list[Bar]] = {}
    for bar in bars:
        is_wide = x(bar.end) - x(bar.start) > 2 * THIN_PIXELS or bool(bar.ending)
        if is_wide or len(bars) <= MAX_BARS:
            wide.append(bar)
        else:
            thin.setdefault((bar.lane, bar.colour), []).append(bar)
    return wide, list(thin.values())


def _thin(bars: Sequence[Bar], x: Axis, y: float, high: float) -> str:
    """Return many thin bars of one lane and colour as one element."""
    gap = high * 5 / LANE_HEIGHT
    columns: dict[int, int] = {}
    for bar in bars:
        first, last = (int(x(each) / THIN_PIXELS) for each in (bar.start, bar.end))
        columns[first] = max(columns.get(first, 0), last + 1 - first)
    down = f"v{decimal(high - 2 * gap)}"
    data = "".join(
        f"M{at * THIN_PIXELS} {decimal(y + gap)}h{many * THIN_PIXELS}{down}h-{many * THIN_PIXELS}z"
        for at, many in columns.items()
    )
    text = f"{sum(bar.count for bar in bars)} thin ones, first: {bars[0].text}"
    return element("path", hint(text), d=data, fill=bars[0].colour, fill_opacity="0.82")


def lanes(
    names: Sequence[str],
    bars: Sequence[Bar],
    signs: Sequence[tuple[str, str]],
    *,
    width: int,
    end: float,
    form: Callable[[float], str] = duration,
    unit: str = "",
) -> tuple[str, int]:
    """Return the content and the height of a picture with one lane per name.

    end: of the time that is shown, from 0 on.
    """
    names, bars = _in_rows(names, bars)
    room = min(max((width_of(name) for name in names), default=0) + 16, MAX_NAME, width * 0.3)
    shown, top = legend(signs, 8, width)
    high = min(max(MAX_LANES_HEIGHT / max(len(names), 1), MIN_LANE_HEIGHT), LANE_HEIGHT)
    height = top + math.ceil(high * max(len(names), 1)) + 6 + below(unit)
    box = Box(room, top + 2, width - EDGE, height - 2 - below(unit))
    x = Axis(0.0, max(end, 1e-9), box.left, box.right)
    parts = [shown, *_names(names, box, high)]
    wide, thin = _told_apart(merged(bars, x), x)
    for of_one in thin:
        parts.append(_thin(of_one, x, box.top + high * of_one[0].lane, high))
    for bar in wide:
        parts += _bar(bar, x, box.top + high * bar.lane, high)
    count = max(2, round((box.right - box.left) / 90))
    parts += x_values(x, box, time_steps(end, count), unit, form)
    return "".join(parts), height


def _in_rows(names: Sequence[str], bars: Sequence[Bar]) -> tuple[Sequence[str], Sequence[Bar]]:
    """Return no more lanes than a picture has rows, each with the first name in it."""
    num_lanes = len(names)
    if num_lanes <= MAX_ROWS:
        return names, bars
    rows = [lane * MAX_ROWS // num_lanes for lane in range(num_lanes)]
    found = [""] * MAX_ROWS
    for name, row in zip(names, rows, strict=True):
        found[row] = found[row] or name
    return found, [replace(bar, lane=rows[bar.lane]) for bar in bars]


def _names(names: Sequence[str], box: Box, high: float) -> Iterator[str]:
    """Yield a line for each lane, and the names that have room. Lanes without a name belong to the
    one above."""
    free = -math.inf
    for at, name in enumerate(names):
        middle = box.top + high * (at + 0.5)
        if high >= MIN_NAME_HEIGHT:
            yield element("line", x1=box.left, x2=box.right, y1=middle, y2=middle, stroke="grid")
        if name and middle >= free:
            yield label(box.left - 8, middle + 4, shortened(name, box.left - 12), anchor="end")
            free = middle + MIN_NAME_HEIGHT


def _bar(bar: Bar, x: Axis, y: float, high: float) -> Iterator[str]:
    left, right = x(bar.start), x(bar.end)
    width = max(right - left, 2.0)
    text = bar.text if bar.count == 1 else f"{bar.count} in one, first: {bar.text}"
    gap = high * 5 / LANE_HEIGHT
    shape: dict[str, Any] = {"x": left, "y": y + gap, "width": width, "height": high - 2 * gap}
    round_: dict[str, Any] = {"rx": 3} if width > 6 and high == LANE_HEIGHT else {}
    yield element("rect", hint(text), **shape, **round_, fill=bar.colour, fill_opacity="0.82")
    middle = y + high / 2 + 3.5
    if bar.inside and width_of(bar.inside, SMALL) + 6 < width and high >= MIN_NAME_HEIGHT:
        size: dict[str, Any] = {"size": SMALL, "anchor": "middle", "weight": "600"}
        yield label(left + width / 2, middle, bar.inside, fill="surface", **size)
    if bar.ending:
        yield label(left + width + 1, middle + 0.5, bar.ending, fill="bad", size=13, weight="700")
