"""Scores of a population by generation: every member faintly, the best one boldly."""

import math
from collections.abc import Sequence
from typing import Any

from stratagem.client.pictures.drawing.frame import (
    EDGE,
    Box,
    below,
    legend,
    line_sign,
    x_values,
    y_grid,
)
from stratagem.client.pictures.drawing.scales import Axis, axis_of, short, whole_steps
from stratagem.client.pictures.drawing.svg import element, hint, path_of
from stratagem.client.pictures.picture import NumberTable, Picture, thinned

Scores = Sequence[Sequence[float | None]]
"""By generation, then by member; None: no score."""


def scores(
    values: Scores, *, title: str, metric: str, less_is_better: bool = False, width: int = 720
) -> Picture:
    """Return the scores of all members, and the best of each generation; metric: what they are."""
    signs = [(line_sign("s2"), f"best {metric}"), (line_sign("muted"), "each member")]
    shown, top = legend(signs, 52, width)
    height = top + 176 + below("generation")
    box = Box(52, top + 6, width - EDGE, top + 176)
    known = [[s for s in of_one if s is not None and math.isfinite(s)] for of_one in values]
    x = Axis(1, max(len(values), 2), box.left + 8, box.right - 8)
    y = axis_of([score for of_one in known for score in of_one], box.bottom, box.top)
    parts = [shown, *y_grid(y, box, count=4)]
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
    best = [(at + 1, choose(of_one)) for at, of_one in enumerate(known) if of_one]
    line = path_of([(x(at), y(score)) for at, score in best])
    parts.append(element("path", d=line, fill="none", stroke="s2", stroke_width=2.4))
    for at, score in best:
        text = hint(f"generation {at}: best {short(score)}")
        parts.append(element("circle", text, cx=x(at), cy=y(score), r=3.5, fill="s2"))
    count = max(2, round((box.right - box.left) / 80))
    parts += x_values(x, box, whole_steps(1, max(len(values), 1), count), "generation")
    rows = [
        (str(at), short(score), short(sorted(known[at - 1])[len(known[at - 1]) // 2]))
        for at, score in best
    ]
    words = (
        f"best {metric} {short(choose(score for _, score in best))}" if best else "no score so far"
    )
    table = NumberTable(("generation", "best", "median"), thinned(rows))
    return Picture(title, words, width, height, "".join(parts), table)
