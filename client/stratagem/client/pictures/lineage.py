"""The lineage of a population: a lane for each member, a line for each copy, the winner in bold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.client.pictures.drawing.frame import (
    EDGE,
    Box,
    below,
    dot_sign,
    legend,
    line_sign,
    x_values,
)
from stratagem.client.pictures.drawing.scales import Axis, short, whole_steps
from stratagem.client.pictures.drawing.svg import SMALL, element, hint, label
from stratagem.client.pictures.picture import NumberTable, Picture, thinned


@dataclass(frozen=True, slots=True)
class LineageNode:
    """A member in a generation."""

    member: int
    generation: int
    parent: int
    """Whose state it began from."""
    score: float | None
    params: str = ""
    """Its hyperparameters in words."""
    wins: bool = False
    """It is in the past of the winner, or is it."""


def lineage(
    nodes: Sequence[LineageNode],
    *,
    title: str,
    best: str = "",
    less_is_better: bool = False,
    width: int = 720,
) -> Picture:
    """Return the members of all generations. best: the winner, in words."""
    count = max((node.member for node in nodes), default=0) + 1
    last = max((node.generation for node in nodes), default=1)
    step = 26 if count <= 24 else max(480 / count, 4.0)
    signs = [
        (line_sign("s2"), "the winner's past"),
        (line_sign("s1"), "a copy"),
        (dot_sign("s1"), "the fuller, the better"),
    ]
    shown, top = legend(signs, 74, width)
    box = Box(74, top + 12, width - 60, top + 12 + step * (count - 1) + 12)
    x = Axis(1, max(last, 2), box.left + 10, box.right)
    scores = sorted((n.score for n in nodes if n.score is not None), reverse=less_is_better)
    known = {(node.member, node.generation): node for node in nodes}

    def place(member: int, generation: int) -> tuple[float, float]:
        return x(generation), box.top + step * member

    parts = [shown]
    if step >= 12:
        for member in range(count):
            style: dict[str, Any] = {"fill": "muted", "anchor": "end", "size": SMALL + 1}
            parts.append(label(box.left - 8, place(member, 1)[1] + 4, f"member {member}", **style))
    for node in sorted(nodes, key=lambda each: each.wins):
        if (node.parent, node.generation - 1) in known:
            a, b = place(node.parent, node.generation - 1), place(node.member, node.generation)
            parts.append(_edge(a, b, node))
    radius = min(6.5, step * 0.36)
    for node in sorted(nodes, key=lambda each: each.wins):
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
        for node in sorted(nodes, key=lambda each: (each.generation, each.member))
    ]
    headings = ("generation", "member", "copied from", "score", "hyperparameters", "wins")
    return NumberTable(headings, thinned(rows, 200))
