"""How many values are how large."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stratagem.client.pictures.drawing.frame import EDGE, Box, below, x_values
from stratagem.client.pictures.drawing.scales import Axis, short, steps, whole_steps
from stratagem.client.pictures.drawing.svg import SMALL, element, hint, label
from stratagem.client.pictures.picture import NumberTable, Picture
from stratagem.common.history.columns import Floats


def histogram(
    values: Sequence[float],
    *,
    title: str,
    name: str,
    form: Callable[[float], str] = short,
    width: int = 360,
    height: int = 194,
) -> Picture:
    """Return a bar for each range of values; name: what they are. Those not finite are left out."""
    known = np.asarray(values, np.float64)  # there may be millions
    finite = np.sort(known[np.isfinite(known)])
    edges = _edges(finite)
    places = np.searchsorted(np.array(edges[1:-1]), finite, "right")
    counts = np.bincount(places, minlength=len(edges) - 1).tolist()
    box = Box(40, 14, width - EDGE, height - below(name))
    x = Axis(edges[0], edges[-1], box.left, box.right)
    most = max(counts, default=0) or 1
    y = Axis(0, most * 1.05, box.bottom, box.top)
    parts = [label(box.left, 10, "how many", fill="muted", size=SMALL)]
    for value in whole_steps(0, most, 3):
        parts.append(
            element("line", x1=box.left, x2=box.right, y1=y(value), y2=y(value), stroke="grid")
        )
        style: dict[str, Any] = {"fill": "muted", "anchor": "end", "size": SMALL + 1}
        parts.append(label(box.left - 6, y(value) + 4, short(value), **style))
    rows: list[tuple[str, ...]] = []
    for at, count in enumerate(counts):
        left, right = x(edges[at]), x(edges[at + 1])
        within = f"{form(edges[at])} to {form(edges[at + 1])}"
        rows.append((within, str(count)))
        if count:
            shape: dict[str, Any] = {
                "x": left + 1,
                "y": y(count),
                "width": max(right - left - 2, 1),
            }
            high = box.bottom - y(count)
            text = hint(f"{within}: {count}")
            parts.append(
                element("rect", text, **shape, height=high, rx=2, fill="s6", fill_opacity="0.8")
            )
    ticks = steps(edges[0], edges[-1], max(2, round((box.right - box.left) / 90)))
    parts += x_values(x, box, ticks, name, form)
    middle = f"; half of them below {form(float(finite[len(finite) // 2]))}" if len(finite) else ""
    words = f"{len(finite)} values{middle}"
    table = NumberTable((name, "how many"), tuple(rows))
    return Picture(title, words, width, height, "".join(parts), table)


def _edges(finite: Floats) -> list[float]:
    """Return the ends of ranges of one round width that hold all values."""
    if not len(finite):
        return [0.0, 1.0]
    low, high = float(finite[0]), float(finite[-1])
    if low == high:
        return [low - (abs(low) * 0.05 or 0.5), low + (abs(low) * 0.05 or 0.5)]
    wanted = min(max(math.ceil(math.sqrt(len(finite))), 4), 24)
    found = steps(low, high, wanted)
    size = found[1] - found[0] if len(found) > 1 else high - low
    first = math.floor(low / size + 1e-9)
    last = math.ceil(high / size - 1e-9)
    return [at * size for at in range(first, max(last, first + 1) + 1)]
