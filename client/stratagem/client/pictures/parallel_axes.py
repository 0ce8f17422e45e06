"""Hyperparameters and score of each member as a line across parallel axes."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stratagem.client.pictures.drawing.frame import legend, line_sign
from stratagem.client.pictures.drawing.scales import Axis, axis_of, short
from stratagem.client.pictures.drawing.svg import (
    SMALL,
    element,
    hint,
    label,
    path_of,
    shortened,
    width_of,
)
from stratagem.client.pictures.picture import NumberTable, Picture, thinned

BOLD: Final = 14
"""The size of ordinary text that is as wide as bold text of size 12."""
MAX_LINES: Final = 3
"""Of names above the axes, where they have no room beside each other."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The values of one member."""

    name: str
    values: Mapping[str, Any]
    """By name of the axis; a member may lack some."""
    wins: bool = False


@dataclass(frozen=True, slots=True)
class _Scale:
    name: str
    place: Callable[[Any], float | None]
    ticks: Sequence[tuple[float, str]]


def parallel_axes(
    names: Sequence[str],
    trials: Sequence[Trial],
    *,
    title: str,
    log: Collection[str] = (),
    width: int = 720,
) -> Picture:
    """Return one axis for each name, and one line for each trial; the winner's in bold.

    log: names of the axes that are logarithmic, where all values are positive; so are those of
    positive numbers over more than a factor of 50. What is no number has its values above each
    other.
    """
    signs = [(line_sign("s2"), "best"), (line_sign("s1"), "other members")]
    shown, top = legend(signs, 20, width)
    room = 44.0
    apart = (width - 2 * room) / max(len(names) - 1, 1)
    xs = [room + apart * at for at in range(len(names))]
    headings, lines = _headings(names, xs, apart, top + 20.0, width)
    high = top + 20.0 + 14.0 * lines
    low = high + 180.0
    scales = [
        _scale(name, [t.values.get(name) for t in trials], low, high, log=name in log)
        for name in names
    ]
    parts = [shown, *headings]
    for at, scale in enumerate(scales):
        x = room + apart * at
        parts.append(element("line", x1=x, x2=x, y1=high, y2=low, stroke="muted"))
        for y, _ in scale.ticks:
            parts.append(element("line", x1=x - 3, x2=x + 3, y1=y, y2=y, stroke="muted"))
    for trial in sorted(trials, key=lambda each: each.wins):
        points = [
            (room + apart * at, up)
            for at, scale in enumerate(scales)
            if (up := scale.place(trial.values.get(scale.name))) is not None
        ]
        colour, size = ("s2", 2.8) if trial.wins else ("s1", 1.2)
        told = ", ".join(f"{n} {_text(v)}" for n, v in trial.values.items())
        shape: dict[str, Any] = {"stroke": colour, "stroke_width": size, "stroke_linejoin": "round"}
        faint = None if trial.wins else "0.5"
        text = hint(f"{trial.name}: {told}")
        data = path_of(points)
        parts.append(element("path", text, d=data, fill="none", stroke_opacity=faint, **shape))
    for at, scale in enumerate(scales):
        for up, text in scale.ticks:
            style: dict[str, Any] = {"fill": "muted", "anchor": "end", "size": SMALL}
            parts.append(label(room + apart * at - 6, up + 4, text, **style, has_halo=True))
    best = next((trial.name for trial in trials if trial.wins), "")
    words = f"{len(trials)} members over {', '.join(names)}{f'; best: {best}' if best else ''}"
    rows = [
        (trial.name, *(_text(trial.values.get(name, "")) for name in names)) for trial in trials
    ]
    table = NumberTable(("member", *names), thinned(rows))
    return Picture(title, words, width, int(low + 14), "".join(parts), table)


def _headings(
    names: Sequence[str], xs: Sequence[float], apart: float, top: float, width: int
) -> tuple[list[str], int]:
    """Return the names above their axes, in as few lines as they have room in, and how many."""
    last = len(names) - 1

    def space(at: int, lines: int) -> float:
        free = apart * lines
        return min(xs[0] + free / 2 - 8 if at in (0, last) else free - 8, width - 8.0)

    def fits(lines: int) -> bool:
        return all(width_of(name, BOLD) <= space(at, lines) for at, name in enumerate(names))

    lines = next((each for each in range(1, MAX_LINES) if fits(each)), MAX_LINES)
    found = []
    for at, name in enumerate(names):
        text = shortened(name, space(at, lines), BOLD)
        half = width_of(text, BOLD) / 2
        x = min(max(xs[at], half + 4), width - half - 4)
        found.append(label(x, top + 14 * (at % lines), text, anchor="middle", weight="600"))
    return found, lines


def _scale(name: str, values: Sequence[Any], low: float, high: float, *, log: bool) -> _Scale:
    present = [value for value in values if value is not None]
    if present and all(_is_number(value) for value in present):
        finite = [float(value) for value in present if math.isfinite(value)]
        is_positive = bool(finite) and min(finite) > 0
        is_log = is_positive and (log or max(finite) / min(finite) > 50)
        axis = axis_of(finite, low, high, log=is_log)
        ticks = [(axis(value), short(value)) for value in axis.ticks(4)]
        return _Scale(name, lambda value: _placed(axis, value), ticks)
    choices = sorted({_text(value) for value in present})
    places = Axis(-0.5, max(len(choices) - 0.5, 0.5), low, high)
    at = {text: places(index) for index, text in enumerate(choices)}
    ticks = [(y, shortened(text, 60, SMALL)) for text, y in at.items()]
    return _Scale(name, lambda value: at.get(_text(value)), ticks)


def _placed(axis: Axis, value: Any) -> float | None:
    return axis(float(value)) if _is_number(value) and math.isfinite(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return short(float(value)) if _is_number(value) else str(value)
