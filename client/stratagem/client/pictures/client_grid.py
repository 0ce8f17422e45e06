"""The clients of a federation: fill is the loss, size the samples, edge and sign the state."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.client.pictures.drawing.frame import legend
from stratagem.client.pictures.drawing.scales import short
from stratagem.client.pictures.drawing.svg import SMALL, element, hint, label
from stratagem.client.pictures.picture import NumberTable, Picture

STATES = {
    "done": ("good", "✓", None),
    "selected": ("muted", "…", "2 2"),
    "late": ("warn", "◷", "4 2"),
    "rejected": ("bad", "✕", None),
    "excused": ("muted", "–", "1 3"),
    "": ("grid", "", None),
}
"""Of each state its colour, its sign and how its edge is broken; "": in no round so far."""


@dataclass(frozen=True, slots=True)
class ClientCell:
    """One client as it is shown."""

    name: str
    state: str
    loss: float
    num_samples: int
    text: str = ""
    """What else there is to say: where it is, why it was rejected."""
    benched_until: str = ""
    """When it may take part again, where it sits on the bench."""


def client_grid(cells: Sequence[ClientCell], *, title: str, width: int = 720) -> Picture:
    """Return a square for each client, in their order, row by row."""
    signs = [
        (_edge(-5, -5, 10, state), state)
        for state in STATES
        if state and any(cell.state == state for cell in cells)
    ]
    signs += [
        (element("rect", x=-5, y=-5, width=10, height=10, fill="s1", fill_opacity=share), name)
        for share, name in (("0.12", "less loss"), ("0.9", "more loss"))
    ]
    shown, top = legend(signs, 8, width)
    size = _size(len(cells), width)
    across = max(int((width - 16) // size), 1)
    rows = math.ceil(len(cells) / across)
    parts = [shown]
    finite = [cell.loss for cell in cells if math.isfinite(cell.loss)]
    span = (min(finite, default=0.0), max(finite, default=1.0))
    most = max((cell.num_samples for cell in cells), default=0)
    for at, cell in enumerate(cells):
        x, y = 8 + at % across * size, top + 4 + at // across * size
        parts.append(_cell(cell, x, y, size, span, most))
    height = int(top + 10 + rows * size)
    counts = {state: sum(cell.state == state for cell in cells) for state in STATES if state}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    words = f"{len(cells)} clients: {told or 'none selected so far'}"
    return Picture(title, words, width, height, "".join(parts), _table(cells))


def _table(cells: Sequence[ClientCell]) -> NumberTable:
    """Return the same numbers; the bench has a column where somebody sits on it."""
    has_bench = any(cell.benched_until for cell in cells)
    heads = (
        "client",
        "state",
        "loss",
        "samples",
        *(["benched until"] if has_bench else []),
        "more",
    )
    rows = (
        (
            *(cell.name, cell.state or "not selected"),
            short(cell.loss) if cell.num_samples else "",
            f"{cell.num_samples:,}",
            *([cell.benched_until] if has_bench else []),
            cell.text,
        )
        for cell in cells
    )
    return NumberTable(heads, tuple(rows))


def _size(count: int, width: int) -> float:
    """Return the side of a cell: as large as suits the number of clients."""
    return next((s for s in (64.0, 48.0, 34.0, 24.0) if count * s * s <= width * 300), 14.0)


def _cell(
    cell: ClientCell, x: float, y: float, size: float, span: tuple[float, float], most: int
) -> str:
    share = math.sqrt(cell.num_samples / most) if most else 1.0
    side = (size - (8 if size >= 24 else 3)) * (0.45 + 0.55 * share) - (12 if size >= 48 else 0)
    left = x + (size - side) / 2
    top = y + (size - side) / 2 - (6 if size >= 48 else 0)
    text = f"client {cell.name}: {cell.state or 'not selected'}"
    if cell.num_samples:
        text += f", loss {short(cell.loss)}, {cell.num_samples:,} samples"
    if cell.benched_until:
        text += f", benched until {cell.benched_until}"
    parts = [hint(f"{text}. {cell.text}" if cell.text else text)]
    if math.isfinite(cell.loss) and cell.num_samples:
        low, high = span
        depth = 0.12 + 0.78 * ((cell.loss - low) / (high - low) if high > low else 0.5)
        shape: dict[str, Any] = {"x": left, "y": top, "width": side, "height": side, "rx": 3}
        parts.append(element("rect", **shape, fill="s1", fill_opacity=f"{depth:.2f}"))
    parts.append(_edge(left, top, side, cell.state, is_small=size < 24))
    colour, sign, _ = STATES[cell.state]
    if size >= 34 and sign:
        # On a surface of its own, as the fill may be as dark as the sign.
        at_x, at_y = left + side, top + 1
        parts.append(element("circle", cx=at_x, cy=at_y, r=6, fill="surface"))
        style: dict[str, Any] = {"size": SMALL, "anchor": "middle", "weight": "700"}
        parts.append(label(at_x, at_y + 4, sign, fill=colour, **style))
    if size >= 48:
        name: dict[str, Any] = {"size": SMALL + 1, "anchor": "middle"}
        parts.append(label(x + size / 2, y + size - 6, cell.name, fill="muted", **name))
    return element("g", *parts)


def _edge(x: float, y: float, side: float, state: str, *, is_small: bool = False) -> str:
    colour, _, dashes = STATES[state]
    shape: dict[str, Any] = {"x": x, "y": y, "width": side, "height": side}
    if is_small:  # no room for a sign: the words are in its hint, and in the table
        return element("rect", **shape, fill="none", stroke=colour, stroke_width=1.2)
    shape |= {"rx": 3, "stroke_width": 2}
    return element("rect", **shape, fill="none", stroke=colour, stroke_dasharray=dashes)
