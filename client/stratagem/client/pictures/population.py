"""Draw a population: its lineage, its hyperparameters, and its scores."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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
    whole_steps,
    x_values,
    y_grid,
)
from stratagem.client.pictures.svg import (
    SMALL,
    NumberTable,
    Picture,
    element,
    hint,
    label,
    path_of,
    shortened,
    thinned,
    width_of,
)

# ---- Lineage ----
#
# Each member has a lane and each copy a line; the winner is bold.


@dataclass(frozen=True, slots=True)
class LineageNode:
    """One member in one generation, to draw in the lineage."""

    member: int
    generation: int
    parent: int
    """The member whose state this member began the generation from."""
    score: float | None
    params: str = ""
    """The hyperparameters, formatted as text."""
    wins: bool = False
    """The node belongs to the lineage of the winner's state."""


def lineage(
    nodes: Sequence[LineageNode],
    *,
    title: str,
    best: str = "",
    less_is_better: bool = False,
    width: int = 720,
) -> Picture:
    """Draw the members of all generations, each linked to its parent. best: the winner, as text."""
    count = max((node.member for node in nodes), default=0) + 1
    last = max((node.generation for node in nodes), default=1)
    step = 26 if count <= 24 else max(480 / count, 4.0)
    signs = [
        (line_sign("s2"), "the winner's past"),
        (line_sign("s1"), "a copy"),
        (dot_sign("s1"), "the fuller, the better"),
    ]
    legend_text, top = legend(signs, 74, width)
    box = Box(74, top + 12, width - 60, top + 12 + step * (count - 1) + 12)
    x = Axis(1, max(last, 2), box.left + 10, box.right)
    scores = sorted((n.score for n in nodes if n.score is not None), reverse=less_is_better)
    by_place = {(node.member, node.generation): node for node in nodes}

    def place(member: int, generation: int) -> tuple[float, float]:
        return x(generation), box.top + step * member

    parts = [legend_text]
    if step >= 12:
        for member in range(count):
            style: dict[str, Any] = {"fill": "muted", "anchor": "end", "size": SMALL + 1}
            parts.append(label(box.left - 8, place(member, 1)[1] + 4, f"member {member}", **style))
    for node in sorted(nodes, key=lambda item: item.wins):
        if (node.parent, node.generation - 1) in by_place:
            a, b = place(node.parent, node.generation - 1), place(node.member, node.generation)
            parts.append(_edge(a, b, node))
    radius = min(6.5, step * 0.36)
    for node in sorted(nodes, key=lambda item: item.wins):
        parts += _node(node, *place(node.member, node.generation), radius, scores)
    generations = whole_steps(1, last, max(2, round((box.right - box.left) / 80)))
    axis_box = Box(box.left, box.top, width - EDGE, box.bottom + 4)
    parts += x_values(x, axis_box, generations, "generation")
    copies = sum(node.parent != node.member for node in nodes)
    words = (
        f"{count} members, {last} generations, {copies} copies{f'; best: {best}' if best else ''}"
    )
    height = int(box.bottom + 6 + below("generation"))
    return Picture(title, words, width, height, "".join(parts), _table(nodes))


def _edge(a: tuple[float, float], b: tuple[float, float], node: LineageNode) -> str:
    is_copy = node.parent != node.member
    colour = "s2" if node.wins else "s1" if is_copy else "grid"
    half = (a[0] + b[0]) / 2
    data = (
        f"M{a[0]:.1f} {a[1]:.1f}C{half:.1f} {a[1]:.1f} {half:.1f} {b[1]:.1f} {b[0]:.1f} {b[1]:.1f}"
    )
    text = (hint(f"member {node.member} copies member {node.parent}"),) if is_copy else ()
    size = 3.0 if node.wins else 1.4
    return element("path", *text, d=data, fill="none", stroke=colour, stroke_width=size)


def _node(
    node: LineageNode, x: float, y: float, radius: float, scores: Sequence[float]
) -> Iterator[str]:
    colour = "s2" if node.wins else "s1"
    score = "no score" if node.score is None else f"score {short(node.score)}"
    text = f"member {node.member}, generation {node.generation}: {score}"
    more = hint(f"{text}, {node.params}" if node.params else text)
    yield element("circle", cx=x, cy=y, r=radius, fill="surface")
    depth = "0"  # scores: from the worst to the best
    if node.score is not None and scores:
        span = scores[-1] - scores[0]
        share = (node.score - scores[0]) / span if span else 1.0
        depth = f"{0.1 + 0.9 * share:.2f}"
    shape: dict[str, Any] = {"cx": x, "cy": y, "r": radius, "fill": colour, "fill_opacity": depth}
    dashes = "2 2" if node.score is None else None
    yield element(
        *("circle", more), **shape, stroke=colour, stroke_width=1.5, stroke_dasharray=dashes
    )


def _table(nodes: Sequence[LineageNode]) -> NumberTable:
    rows = [
        (
            *(str(node.generation), str(node.member)),
            str(node.parent) if node.parent != node.member else "",
            *("" if node.score is None else short(node.score), node.params),
            "winner" if node.wins else "",
        )
        for node in sorted(nodes, key=lambda item: (item.generation, item.member))
    ]
    headings = ("generation", "member", "copied from", "score", "hyperparameters", "wins")
    return NumberTable(headings, thinned(rows, 200))


# ---- Parallel axes ----
#
# The hyperparameters and the score of each member are a line across parallel axes.

BOLD: Final = 14
"""The font size at which ordinary text is as wide as bold text of size 12."""
MAX_LINES: Final = 3
"""The largest number of lines of names above the axes, if the names do not fit side by side."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The hyperparameters and the score of one member, to draw as a line over parallel axes."""

    name: str
    values: Mapping[str, Any]
    """The values, keyed by axis name; some may be missing."""
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
    """Draw parallel coordinates: an axis per name, and a line per trial (member); the winner's is
    bold.

    log: names of axes that are logarithmic if all values are positive; so are axes whose positive
    values span more than a factor of 50. Values that are not numbers are spaced evenly.
    """
    signs = [(line_sign("s2"), "best"), (line_sign("s1"), "other members")]
    legend_text, top = legend(signs, 20, width)
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
    parts = [legend_text, *headings]
    for at, scale in enumerate(scales):
        x = room + apart * at
        parts.append(element("line", x1=x, x2=x, y1=high, y2=low, stroke="muted"))
        for y, _ in scale.ticks:
            parts.append(element("line", x1=x - 3, x2=x + 3, y1=y, y2=y, stroke="muted"))
    for trial in sorted(trials, key=lambda item: item.wins):
        points = [
            (room + apart * at, up)
            for at, scale in enumerate(scales)
            if (up := scale.place(trial.values.get(scale.name))) is not None
        ]
        colour, size = ("s2", 2.8) if trial.wins else ("s1", 1.2)
        values_text = ", ".join(f"{n} {_text(v)}" for n, v in trial.values.items())
        shape: dict[str, Any] = {"stroke": colour, "stroke_width": size, "stroke_linejoin": "round"}
        faint = None if trial.wins else "0.5"
        text = hint(f"{trial.name}: {values_text}")
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
    """Return the SVG of the names above their axes, on as few lines as possible, and their
    number."""
    last = len(names) - 1

    def space(at: int, lines: int) -> float:
        free = apart * lines
        return min(xs[0] + free / 2 - 8 if at in (0, last) else free - 8, width - 8.0)

    def fits(lines: int) -> bool:
        return all(width_of(name, BOLD) <= space(at, lines) for at, name in enumerate(names))

    lines = next((count for count in range(1, MAX_LINES) if fits(count)), MAX_LINES)
    headings = []
    for at, name in enumerate(names):
        text = shortened(name, space(at, lines), BOLD)
        half = width_of(text, BOLD) / 2
        x = min(max(xs[at], half + 4), width - half - 4)
        headings.append(label(x, top + 14 * (at % lines), text, anchor="middle", weight="600"))
    return headings, lines


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


# ---- Scores ----
#
# Scores are shown by generation: every member faintly, the best one boldly.

Scores = Sequence[Sequence[float | None]]
"""The scores of each generation, in it of each member; None for a member without a score."""


def scores(
    values: Scores, *, title: str, metric: str, less_is_better: bool = False, width: int = 720
) -> Picture:
    """Draw the scores of all members, and the best of each generation; metric: the score's name."""
    signs = [(line_sign("s2"), f"best {metric}"), (line_sign("muted"), "each member")]
    legend_text, top = legend(signs, 52, width)
    height = top + 176 + below("generation")
    box = Box(52, top + 6, width - EDGE, top + 176)
    finite = [[s for s in of_one if s is not None and math.isfinite(s)] for of_one in values]
    x = Axis(1, max(len(values), 2), box.left + 8, box.right - 8)
    y = axis_of([score for of_one in finite for score in of_one], box.bottom, box.top)
    parts = [legend_text, *y_grid(y, box, count=4)]
    members = max((len(of_one) for of_one in values), default=0)
    for member in range(members):
        points = [
            (x(at + 1), y(score))
            for at, of_one in enumerate(values)
            if member < len(of_one) and (score := of_one[member]) is not None
        ]
        faint: dict[str, Any] = {"stroke": "muted", "stroke_opacity": "0.4", "stroke_width": 1.0}
        text = hint(f"member {member}")
        parts.append(element("path", text, d=path_of(points), fill="none", **faint))
    choose = min if less_is_better else max
    best = [(at + 1, choose(of_one)) for at, of_one in enumerate(finite) if of_one]
    line = path_of([(x(at), y(score)) for at, score in best])
    parts.append(element("path", d=line, fill="none", stroke="s2", stroke_width=2.4))
    for at, score in best:
        text = hint(f"generation {at}: best {short(score)}")
        parts.append(element("circle", text, cx=x(at), cy=y(score), r=3.5, fill="s2"))
    count = max(2, round((box.right - box.left) / 80))
    parts += x_values(x, box, whole_steps(1, max(len(values), 1), count), "generation")
    rows = [
        (str(at), short(score), short(sorted(finite[at - 1])[len(finite[at - 1]) // 2]))
        for at, score in best
    ]
    words = (
        f"best {metric} {short(choose(score for _, score in best))}" if best else "no score so far"
    )
    table = NumberTable(("generation", "best", "median"), thinned(rows))
    return Picture(title, words, width, height, "".join(parts), table)
