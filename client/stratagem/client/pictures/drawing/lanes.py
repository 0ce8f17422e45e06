"""Lanes of bars over time: what time lines, members and pipelines are drawn with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.client.pictures.drawing.frame import Box, legend, x_values
from stratagem.client.pictures.drawing.scales import Axis, duration, time_steps
from stratagem.client.pictures.drawing.svg import (
    SMALL,
    element,
    hint,
    label,
    shortened,
    width_of,
)

LANE_HEIGHT = 24
MAX_NAME = 150.0


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
    """Return whether two bars are too close, and one too narrow, to be told apart."""
    if before.ending or bar.start - before.end >= pixel:
        return False
    return min(bar.end - bar.start, before.end - before.start) < 3 * pixel


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
    room = min(max((width_of(name) for name in names), default=0) + 16, MAX_NAME, width * 0.3)
    shown, top = legend(signs, 8, width)
    height = top + LANE_HEIGHT * max(len(names), 1) + 30
    box = Box(room, top + 2, width - 14, height - 26)
    x = Axis(0.0, max(end, 1e-9), box.left, box.right)
    parts = [shown]
    for at, name in enumerate(names):
        y = box.top + LANE_HEIGHT * at
        middle = y + LANE_HEIGHT / 2
        parts.append(
            element("line", x1=box.left, x2=box.right, y1=middle, y2=middle, stroke="grid")
        )
        parts.append(label(box.left - 8, middle + 4, shortened(name, room - 12), anchor="end"))
    for bar in merged(bars, x):
        parts += _bar(bar, x, box)
    count = max(2, round((box.right - box.left) / 90))
    parts += x_values(x, box, time_steps(end, count), unit, form)
    return "".join(parts), height


def _bar(bar: Bar, x: Axis, box: Box) -> Iterator[str]:
    left, right = x(bar.start), x(bar.end)
    width = max(right - left, 2.0)
    top = box.top + LANE_HEIGHT * bar.lane + 5
    text = bar.text if bar.count == 1 else f"{bar.count} in one, first: {bar.text}"
    shape: dict[str, Any] = {"x": left, "y": top, "width": width, "height": LANE_HEIGHT - 10}
    round_: dict[str, Any] = {"rx": 3} if width > 6 else {}
    yield element("rect", hint(text), **shape, **round_, fill=bar.colour, fill_opacity="0.82")
    if bar.inside and width_of(bar.inside, SMALL) + 6 < width:
        middle = top + LANE_HEIGHT / 2 - 1.5
        size: dict[str, Any] = {"size": SMALL, "anchor": "middle", "weight": "600"}
        yield label(left + width / 2, middle, bar.inside, fill="surface", **size)
    if bar.ending:
        yield label(left + width + 1, top + 11, bar.ending, fill="bad", size=13, weight="700")
