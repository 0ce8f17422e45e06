"""The frame of a plot: its grid, what is written at its axes, and its legend."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stratagem.client.pictures.drawing.scales import Axis, short
from stratagem.client.pictures.drawing.svg import SMALL, element, escaped, label, width_of

EDGE = 14
"""Pixels to the right of a box that its last value may reach into."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float


def y_grid(
    axis: Axis, box: Box, *, count: int = 5, form: Callable[[float], str] = short
) -> Iterable[str]:
    """Yield the lines across the box at round values, and these values left of it."""
    for value in axis.ticks(count):
        y = axis(value)
        yield element("line", x1=box.left, x2=box.right, y1=y, y2=y, stroke="grid")
        yield label(box.left - 6, y + 4, form(value), fill="muted", anchor="end", size=SMALL + 1)


def x_values(
    axis: Axis,
    box: Box,
    values: Sequence[float],
    name: str = "",
    form: Callable[[float], str] = short,
) -> Iterable[str]:
    """Yield the values below the box, and below them what they are of: `below(name)` pixels."""
    yield element("line", x1=box.left, x2=box.right, y1=box.bottom, y2=box.bottom, stroke="muted")
    for value in values:
        x, text = axis(value), form(value)
        yield element("line", x1=x, x2=x, y1=box.bottom, y2=box.bottom + 4, stroke="muted")
        half = width_of(text, SMALL + 1) / 2
        # The box ends some pixels before the picture does, and a text is at most that much wider.
        at = min(x, box.right + EDGE - half)
        yield label(at, box.bottom + 17, text, fill="muted", anchor="middle", size=SMALL + 1)
    if name:
        y = box.bottom + 31
        yield label(box.right, y, name, fill="muted", anchor="end", size=SMALL + 1)


def below(name: str) -> int:
    """Return how many pixels the values of an axis, and its name, take below their box."""
    return 38 if name else 24


def legend(entries: Sequence[tuple[str, str]], left: float, width: float) -> tuple[str, int]:
    """Return a legend and its height. entries: the sign, as SVG around (0, 0), and its name."""
    x, y, parts = left, 14.0, list[str]()
    for sign, name in entries:
        room = 16 + width_of(name) + 14
        if x > left and x + room > width:
            x, y = left, y + 18
        parts.append(
            f'<g transform="translate({x + 5:.1f} {y - 4:.1f})">{sign}</g>'
            + label(x + 15, y, name, fill="ink")
        )
        x += room
    return "".join(parts), int(y + 12) if entries else 6


def line_sign(colour: str) -> str:
    """Return the sign of a line in a legend."""
    return element("line", x1=-5, x2=6, y1=0, y2=0, stroke=colour, stroke_width=2.5)


def dot_sign(colour: str, radius: float = 3.5) -> str:
    """Return the sign of dots in a legend."""
    return element("circle", r=radius, cx=0, cy=0, fill=colour)


def box_sign(colour: str, **attributes: str | float | None) -> str:
    """Return the sign of an area in a legend."""
    return element("rect", x=-5, y=-5, width=10, height=10, rx=2, fill=colour, **attributes)


def triangle(x: float, y: float, fill: str, text: str = "", *, up: bool) -> str:
    """Return a triangle whose tip is at a point."""
    back = y + 8 if up else y - 8
    points = f"{x - 4.5:.1f},{back:.1f} {x + 4.5:.1f},{back:.1f} {x:.1f},{y:.1f}"
    inside = [f"<title>{escaped(text)}</title>"] if text else []
    return element("polygon", *inside, points=points, fill=fill)
