"""The parties of a run as a tree: how each one trains, how far it is, and its loss in small."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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

ROW = 26
INDENT = 16
MAX_POINTS = 150
"""Of a small curve."""
MAX_DRAWN = 60
"""Parties that have a row; the table has more."""


@dataclass(frozen=True, slots=True)
class PartyRow:
    """A party, below the one that it is part of."""

    path: str
    strategy: str
    """That it trains under."""
    done: str
    """How far it is, such as "3 segments"."""
    losses: Sequence[float]
    """In order of time; of very many as many as a small curve has columns are drawn."""
    failure: str = ""

    @property
    def depth(self) -> int:
        """Return how many parties it is inside of, but for the run."""
        return self.path.count("/")


def party_tree(rows: Sequence[PartyRow], *, title: str, width: int = 720) -> Picture:
    """Return a row for each party. rows: each below its parent, and siblings in order."""
    shown = rows[:MAX_DRAWN]
    names = [row.path.rpartition("/")[2] for row in shown]
    named = max(
        (INDENT * r.depth + width_of(n) for r, n in zip(shown, names, strict=True)), default=0
    )
    name_end = min(26 + named + 18, width * 0.45)
    finite = [loss for row in shown for loss in row.losses if math.isfinite(loss)]
    longest = max((len(row.losses) for row in shown), default=0)
    x = Axis(0, max(longest - 1, 1), width - 60 - min(150.0, width * 0.28), width - 60.0)
    parts = [label(width - 8, 11, "loss", fill="muted", anchor="end", size=SMALL)] if finite else []
    for at, (row, name) in enumerate(zip(shown, names, strict=True)):
        y = 22 + ROW * at
        parts += _branch(shown, at, y)
        left = 26 + INDENT * row.depth
        parts.append(label(left, y + 4, shortened(name, name_end - left), weight="600"))
        told = ", ".join(filter(None, [row.strategy, "failed" if row.failure else row.done]))
        room = x.start - name_end - 10
        colour = "bad" if row.failure else "muted"
        if room > 40:
            text = shortened(told, room, SMALL + 1)
            parts.append(label(name_end, y + 4, text, fill=colour, size=SMALL + 1))
        parts += _small_curve(row, x, axis_of(finite, y + 9, y - 9), y, width)
    left_out = len(rows) - len(shown)
    if left_out:
        parts.append(label(26, 26 + ROW * len(shown), f"and {left_out} more", fill="muted"))
    failed = sum(bool(row.failure) for row in rows)
    words = f"{len(rows)} parties{f'; {failed} have failed' if failed else ''}"
    height = 22 + ROW * (len(shown) + bool(left_out))
    return Picture(title, words, width, height, "".join(parts), _table(rows))


def _branch(rows: Sequence[PartyRow], at: int, y: float) -> Iterator[str]:
    """Yield the lines from a party to the one that it is part of."""
    depth = rows[at].depth
    x = 14 + INDENT * depth
    above = next((y - ROW * (at - n) for n in range(at - 1, -1, -1) if rows[n].depth <= depth), 6.0)
    data = f"M{x} {above:.0f}V{y}H{x + 8}"
    yield element("path", d=data, fill="none", stroke="muted", stroke_opacity="0.6")


def _small_curve(row: PartyRow, x: Axis, axis: Axis, y: float, width: int) -> Iterator[str]:
    """Yield the losses of a party on the scales of all, and the last one in words."""
    if not row.losses:
        return
    last = len(row.losses) - 1
    places = [*range(0, last, last // MAX_POINTS + 1), last]
    points = [(x(at), axis(row.losses[at])) for at in places if math.isfinite(row.losses[at])]
    shape: dict[str, Any] = {"stroke_width": 1.5, "stroke_linejoin": "round"}
    words = hint(f"{row.path}: loss {short(row.losses[0])} to {short(row.losses[-1])}")
    yield element("path", words, d=path_of(points), fill="none", stroke="s1", **shape)
    for at, up in points[-1:]:
        yield element("circle", words, cx=at, cy=up, r=2.2, fill="s1")
    style: dict[str, Any] = {"anchor": "end", "size": SMALL + 1}
    yield label(width - 8, y + 4, short(row.losses[-1]), **style)


def _table(rows: Sequence[PartyRow]) -> NumberTable:
    listed = [
        (
            *(row.path, row.strategy, row.done),
            *((short(row.losses[0]), short(row.losses[-1])) if row.losses else ("", "")),
            row.failure,
        )
        for row in rows
    ]
    headings = ("party", "trains under", "done", "first loss", "last loss", "failure")
    return NumberTable(headings, thinned(listed, 200))
