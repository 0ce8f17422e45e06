"""Draw the axes of plots: scales that map values to pixels, grids, labels and legends."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stratagem.client.pictures.svg import SMALL, element, escaped, label, width_of

# ---- Scales ----


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic scale from values to pixels; `start` is above `end` on a y axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value, clipped to the range."""
        return self.start + (self.end - self.start) * min(max(self._share(value), 0.0), 1.0)

    def beyond(self, value: float) -> float:
        """Return the pixel of a value without clipping it to the range."""
        return self.start + (self.end - self.start) * self._share(value)

    def _share(self, value: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        return (self._scaled(value) - low) / (high - low) if high > low else 0.5

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, self.low, 1e-300)) if self.log else value

    def ticks(self, count: int = 5) -> list[float]:
        """Return about `count` round tick values within the range, at least two if possible."""
        if self.log:
            return _powers(self.low, self.high, count)
        for more in range(count, 4 * count):
            ticks = steps(self.low, self.high, more)
            if len(ticks) >= min(count, 3):
                return ticks
        return steps(self.low, self.high, count)


MIN_VALUES = 16
"""The least number of values for which outliers are detected."""


def usual_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of a series without its outliers, widened by its length on both sides;
    infinite if no value lies far from the others."""
    finite = sorted(filter(math.isfinite, values))
    if len(finite) < MIN_VALUES:
        return -math.inf, math.inf
    cut = len(finite) // 50
    usual_low, usual_high = finite[cut], finite[-1 - cut]
    room = usual_high - usual_low
    if room <= 0 or finite[-1] - finite[0] <= 4 * room:
        return -math.inf, math.inf
    return usual_low - room, usual_high + room


def axis_of(values: Iterable[float], start: float, end: float, *, log: bool = False) -> Axis:
    """Return a scale that shows all finite values, with a margin above and below."""
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not finite:
        return Axis(1.0 if log else 0.0, 10.0 if log else 1.0, start, end, log)
    low, high = min(finite), max(finite)
    if log:
        low, high = (low / 1.2, high * 1.2) if high / low < 10 else (low / 1.05, high * 1.05)
        return Axis(low, high, start, end, log)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 0.5
    bottom = 0.0 if 0 <= low < (high - low) * 0.35 else low - room
    return Axis(bottom, high + room, start, end)


def steps(low: float, high: float, count: int) -> list[float]:
    """Return about `count` evenly spaced round values within the range."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / size - 1e-9)
    last = math.floor(high / size + 1e-9)
    return [at * size for at in range(first, last + 1)]


def whole_steps(low: float, high: float, count: int) -> list[float]:
    """Return about `count` evenly spaced whole numbers within the range."""
    numbers = [value for value in steps(low, high, count) if abs(value - round(value)) < 1e-9]
    return numbers or [float(value) for value in range(math.ceil(low), math.floor(high) + 1)]


def _powers(low: float, high: float, count: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1,), (1, 3), (1, 2, 5)):
        powers = [f * 10.0**p for p in range(first, last + 1) for f in factors]
        ticks = [value for value in powers if low <= value <= high]
        if len(ticks) >= 2:
            every = max(1, math.ceil(len(ticks) / (count + 1)))
            return ticks[::every]
    return steps(low, high, count)


def short(value: float) -> str:
    """Format a number for an axis or a table: "0.05", "12,000", "3e-05"."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e7 or size < 1e-4:
        mantissa, _, power = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(power)}" if power else mantissa
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def size_text(num_bytes: float) -> str:
    """Format a number of bytes, such as "768 B", "59.4 KiB" or "23.5 GiB"."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if abs(num_bytes) < 1024:
            return f"{num_bytes:,.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} TiB"


def duration(seconds: float) -> str:
    """Format a duration, such as "0.25 s", "12 s", "3:05" or "2:10:00"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def time_steps(high: float, count: int) -> list[float]:
    """Return about `count` round times in seconds, from 0 to `high`."""
    if high <= 0:
        return [0.0]
    raw = high / max(count, 1)
    round_ones = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400)
    size = next((float(seconds) for seconds in round_ones if seconds >= raw * 0.999), raw)
    if raw < 1:
        return steps(0.0, high, count)
    return [at * size for at in range(int(high / size + 1e-9) + 1)]


# ---- Frame ----

EDGE = 14
"""The pixels beyond the right edge of a plot into which its last axis label may reach."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels: the area of a plot."""

    left: float
    top: float
    right: float
    bottom: float


def y_grid(
    axis: Axis, box: Box, *, count: int = 5, form: Callable[[float], str] = short
) -> Iterable[str]:
    """Yield horizontal grid lines at round values, and their labels left of the box."""
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
    """Yield a horizontal axis, its labels and name; they need `below(name)` pixels below the
    box."""
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
    """Return the pixels that the labels and the name of a horizontal axis need below the plot."""
    return 38 if name else 24


def legend(entries: Sequence[tuple[str, str]], left_x: float, width: float) -> tuple[str, int]:
    """Draw a legend; return its SVG and height. entries: (sign, as SVG around (0, 0), and name)."""
    x, y, parts = left_x, 14.0, list[str]()
    for sign, name in entries:
        room = 16 + width_of(name) + 14
        if x > left_x and x + room > width:
            x, y = left_x, y + 18
        parts.append(
            f'<g transform="translate({x + 5:.1f} {y - 4:.1f})">{sign}</g>'
            + label(x + 15, y, name, fill="ink")
        )
        x += room
    return "".join(parts), int(y + 12) if entries else 6


def line_sign(colour: str) -> str:
    """Return the legend sign of a line."""
    return element("line", x1=-5, x2=6, y1=0, y2=0, stroke=colour, stroke_width=2.5)


def dot_sign(colour: str, radius: float = 3.5) -> str:
    """Return the legend sign of dots."""
    return element("circle", r=radius, cx=0, cy=0, fill=colour)


def box_sign(colour: str, **attributes: str | float | None) -> str:
    """Return the legend sign of an area."""
    return element("rect", x=-5, y=-5, width=10, height=10, rx=2, fill=colour, **attributes)


def triangle(x: float, y: float, fill: str, text: str = "", *, up: bool) -> str:
    """Return a triangle with its tip at the point (x, y). up: pointing up, otherwise down."""
    back = y + 8 if up else y - 8
    points = f"{x - 4.5:.1f},{back:.1f} {x + 4.5:.1f},{back:.1f} {x:.1f},{y:.1f}"
    inside = [f"<title>{escaped(text)}</title>"] if text else []
    return element("polygon", *inside, points=points, fill=fill)
