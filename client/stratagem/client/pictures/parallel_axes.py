"""Hyperparameters and score of each member as a line across parallel axes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.client.pictures.drawing.frame import legend, line_sign
from stratagem.client.pictures.drawing.scales import Axis, axis_of, short
from stratagem.client.pictures.drawing.svg import SMALL, element, hint, label, path_of, shortened
from stratagem.client.pictures.picture import NumberTable, Picture, thinned


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
    names: Sequence[str], trials: Sequence[Trial], *, title: str, width: int = 720
) -> Picture:
    """Return one axis for each name, and one line for each trial; the winner's in bold.

    Positive numbers over more than a factor of 50 have a logarithmic axis; what is no number has
    its values above each other.
    """
    signs = [(line_sign("s2"), "best"), (line_sign("s1"), "other members")]
    shown, top = legend(signs, 20, width)
    high, low = top + 34.0, top + 214.0
    room = 44.0
    apart = (width - 2 * room) / max(len(names) - 1, 1)
    scales = [_scale(name, [t.values.get(name) for t in trials], low, high) for name in names]
    parts = [shown]
    for at, scale in enumerate(scales):
        x = room + apart * at
        parts.append(element("line", x1=x, x2=x, y1=high, y2=low, stroke="muted"))
        place = (
            "start" if at == 0 and len(names) > 1 else "end" if at == len(names) - 1 else "middle"
        )
        start = x - 30 if place == "start" else x + 30 if place == "end" else x
        name = shortened(scale.name, apart if len(names) > 1 else width - 20.0)
        parts.append(label(start, high - 14, name, anchor=place, weight="600"))
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


def _scale(name: str, values: Sequence[Any], low: float, high: float) -> _Scale:
    present = [value for value in values if value is not None]
    if present and all(_is_number(value) for value in present):
        finite = [float(value) for value in present if math.isfinite(value)]
        log = bool(finite) and min(finite) > 0 and max(finite) / min(finite) > 50
        axis = axis_of(finite, low, high, log=log)
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
