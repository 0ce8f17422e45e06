"""Nodes on a circle, and who exchanges with whom at which weight."""

import math
from collections.abc import Sequence
from typing import Any

from stratagem.client.pictures.drawing.scales import short
from stratagem.client.pictures.drawing.svg import SMALL, element, hint, label, shortened
from stratagem.client.pictures.picture import NumberTable, Picture, thinned

Edge = tuple[int, int, float]
"""Two nodes, and the weight between them."""

MAX_NAMED = 40
MAX_WEIGHED = 12
"""Edges at which their weight is written."""


def topology(
    names: Sequence[str],
    edges: Sequence[Edge],
    *,
    title: str,
    workers: Sequence[str] = (),
    width: int = 360,
    height: int = 300,
) -> Picture:
    """Return the nodes by name on a circle, with a line for each edge, the wider the heavier.
    workers: those that have each node, if that is known."""
    at_worker = [f"{n} on {w}" for n, w in zip(names, workers, strict=False)] or names
    room = 14 if len(names) > MAX_NAMED else 58
    radius = max(min(width / 2 - room - 34, height / 2 - 34), 20.0)
    places = [_place(at, len(names), width / 2, height / 2, radius) for at in range(len(names))]
    heaviest = max((weight for *_, weight in edges), default=1.0) or 1.0
    many = len(edges) > 1000
    parts: list[str] = []
    for a, b, weight in edges:
        text = () if many else (hint(f"{at_worker[a]} and {at_worker[b]}: weight {short(weight)}"),)
        ends: dict[str, Any] = {
            "x1": places[a][0],
            "y1": places[a][1],
            "x2": places[b][0],
            "y2": places[b][1],
        }
        size = 0.5 if many else 0.8 + 2.7 * weight / heaviest
        parts.append(
            element(*("line", *text), **ends, stroke="s1", stroke_width=size, stroke_opacity="0.45")
        )
    if len(edges) <= MAX_WEIGHED:
        parts += [_weight(weight, places[a], places[b]) for a, b, weight in edges]
    for at, (x, y) in enumerate(places):
        parts.append(element("circle", hint(at_worker[at]), cx=x, cy=y, r=6, fill="s1"))
        if len(names) <= MAX_NAMED:
            lines = [names[at], *([workers[at]] if workers else [])]
            parts.append(_name(lines, x, y, width, height))
    rows = [(at_worker[a], at_worker[b], short(weight)) for a, b, weight in edges]
    words = f"{len(names)} nodes, {len(edges)} pairs that exchange"
    table = NumberTable(("node", "and", "weight"), thinned(rows))
    return Picture(title, words, width, height, "".join(parts), table)


def _place(at: int, count: int, x: float, y: float, radius: float) -> tuple[float, float]:
    angle = 2 * math.pi * at / max(count, 1) - math.pi / 2
    return x + radius * math.cos(angle), y + radius * math.sin(angle)


def _weight(weight: float, start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return the weight of an edge beside its middle, where edges through the centre do not
    meet."""
    x, y = (a + 0.4 * (b - a) for a, b in zip(start, end, strict=True))
    style: dict[str, Any] = {"fill": "muted", "anchor": "middle", "size": SMALL}
    return label(x, y + 4, short(weight), **style, has_halo=True)


def _name(lines: Sequence[str], x: float, y: float, width: int, height: int) -> str:
    """Return what a node is called, and below it in paler letters where it is."""
    away_x, away_y = x - width / 2, y - height / 2
    distance = math.hypot(away_x, away_y) or 1.0
    at_x, at_y = x + away_x / distance * 13, y + away_y / distance * 15 + 4
    side = away_x / distance
    anchor = "middle" if abs(side) < 0.35 else "start" if side > 0 else "end"
    space = width - at_x if anchor == "start" else at_x if anchor == "end" else width / 2
    above = (
        (len(lines) - 1) * 13 * (0 if away_y / distance > 0.35 else 0.5 if abs(side) > 0.35 else 1)
    )
    return "".join(
        label(
            at_x,
            at_y - above + 13 * row,
            shortened(line, space, SMALL + 1),
            fill="muted" if row else "ink",
            anchor=anchor,
            size=SMALL + 1,
        )
        for row, line in enumerate(lines)
    )
