"""Draw a federation: its clients as a grid, its rounds, and histograms."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stratagem.client.pictures.axes import (
    EDGE,
    Axis,
    Box,
    axis_of,
    below,
    box_sign,
    duration,
    legend,
    line_sign,
    short,
    steps,
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
    thinned,
)
from stratagem.common.history.columns import Floats

# ---- Grid of clients ----
#
# Fill is the loss, size the samples, edge and sign the state.

STATES = {
    "done": ("good", "✓", None),
    "selected": ("muted", "…", "2 2"),
    "late": ("warn", "◷", "4 2"),
    "rejected": ("bad", "✕", None),
    "excused": ("muted", "–", "1 3"),
    "": ("grid", "", None),
}
"""The colour, sign and dash pattern of each client state in the grid; "": not yet in a round."""


@dataclass(frozen=True, slots=True)
class ClientCell:
    """One client's square in the grid, with the values for its tooltip."""

    name: str
    state: str
    loss: float
    num_samples: int
    text: str = ""
    """Further text in the tooltip, such as the worker or the reason of a rejection."""
    benched_until: str = ""
    """The first round in which a benched client may take part again; empty if it is not benched."""


def client_grid(cells: Sequence[ClientCell], *, title: str, width: int = 720) -> Picture:
    """Draw the clients as a grid of squares, in order, row by row."""
    signs = [
        (_edge(-5, -5, 10, state), state)
        for state in STATES
        if state and any(cell.state == state for cell in cells)
    ]
    signs += [
        (element("rect", x=-5, y=-5, width=10, height=10, fill="s1", fill_opacity=share), name)
        for share, name in (("0.12", "less loss"), ("0.9", "more loss"))
    ]
    legend_text, top = legend(signs, 8, width)
    size = _size(len(cells), width)
    across = max(int((width - 16) // size), 1)
    rows = math.ceil(len(cells) / across)
    parts = [legend_text]
    finite = [cell.loss for cell in cells if math.isfinite(cell.loss)]
    span = (min(finite, default=0.0), max(finite, default=1.0))
    most = max((cell.num_samples for cell in cells), default=0)
    for at, cell in enumerate(cells):
        x, y = 8 + at % across * size, top + 4 + at // across * size
        parts.append(_cell(cell, x, y, size, span, most))
    height = int(top + 10 + rows * size)
    counts = {state: sum(cell.state == state for cell in cells) for state in STATES if state}
    counts_text = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    words = f"{len(cells)} clients: {counts_text or 'none selected so far'}"
    return Picture(title, words, width, height, "".join(parts), _table(cells))


def _table(cells: Sequence[ClientCell]) -> NumberTable:
    """Return the grid's values as a table, with a column for benches if any client is benched."""
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
    """Return the side length of a client's square, which depends on the number of clients."""
    return next((s for s in (64.0, 48.0, 34.0, 24.0) if count * s * s <= width * 300), 14.0)


def _cell(
    cell: ClientCell, x: float, y: float, size: float, span: tuple[float, float], most: int
) -> str:
    share = math.sqrt(cell.num_samples / most) if most else 1.0
    side = (size - (8 if size >= 24 else 3)) * (0.45 + 0.55 * share) - (12 if size >= 48 else 0)
    left_x = x + (size - side) / 2
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
        shape: dict[str, Any] = {"x": left_x, "y": top, "width": side, "height": side, "rx": 3}
        parts.append(element("rect", **shape, fill="s1", fill_opacity=f"{depth:.2f}"))
    parts.append(_edge(left_x, top, side, cell.state, is_small=size < 24))
    colour, sign, _ = STATES[cell.state]
    if size >= 34 and sign:
        # On a surface of its own, as the fill may be as dark as the sign.
        at_x, at_y = left_x + side, top + 1
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
    if is_small:  # no room for a sign; the tooltip and the table have the state
        return element("rect", **shape, fill="none", stroke=colour, stroke_width=1.2)
    shape |= {"rx": 3, "stroke_width": 2}
    return element("rect", **shape, fill="none", stroke=colour, stroke_dasharray=dashes)


# ---- Rounds ----
#
# Three plots show the loss, the clients by state, and the time against the deadline.

COLOURS = {"done": "good", "late": "warn", "rejected": "bad", "selected": "grid"}
"""The colour of each state in a stacked bar, from the bottom up."""
MIN_PIXELS = 2.0
"""The least width of a column; if rounds have less room, several share one."""


@dataclass(frozen=True, slots=True)
class RoundBar:
    """The numbers of one round to plot."""

    number: int
    loss: float
    counts: dict[str, int]
    """The number of clients in each state."""
    num_needed: int | None = None
    seconds: float | None = None
    """The duration of the round; None while it is open."""
    deadline: float | None = None
    """The deadline, in seconds after the round's beginning; None if there is none."""


def rounds(bars: Sequence[RoundBar], *, title: str, width: int = 720) -> Picture:
    """Draw loss, clients and duration of all rounds as three plots with one horizontal axis.

    If there is not enough room, several rounds share a column, which has the last loss and the
    range of losses, the mean number of clients, and the longest time.
    """
    present = [state for state in COLOURS if any(bar.counts.get(state) for bar in bars)]
    signs = [(line_sign("s1"), "loss")]
    signs += [(box_sign(COLOURS[state]), state) for state in present]
    if any(bar.num_needed is not None for bar in bars):
        signs.append((_dashes("ink"), "needed to close"))
    signs.append((box_sign("s6"), "time"))
    if any(bar.deadline is not None for bar in bars):
        signs.append((_dashes("bad"), "deadline"))
    legend_text, top = legend(signs, 52, width)
    first, last = (bars[0].number, bars[-1].number) if bars else (1, 1)
    left_x, right_x = 52.0, float(width - EDGE)
    x = Axis(first - 0.5, last + 0.5, left_x, right_x)
    boxes = [Box(left_x, top + a, right_x, top + b) for a, b in ((10, 110), (134, 214), (238, 298))]
    columns = _columns(bars, math.ceil(len(bars) * MIN_PIXELS / (right_x - left_x)))
    parts = [legend_text, *_losses(columns, x, boxes[0]), *_clients(columns, x, boxes[1])]
    parts += _times(columns, x, boxes[2])
    count = max(2, round((right_x - left_x) / 80))
    parts += x_values(x, boxes[2], whole_steps(first, last, count), "round")
    rows = [
        (
            *(str(bar.number), short(bar.loss) if math.isfinite(bar.loss) else ""),
            *(str(bar.counts.get(state, 0)) for state in ("done", "late", "rejected")),
            "all" if bar.num_needed is None else str(bar.num_needed),
            "open" if bar.seconds is None else duration(bar.seconds),
            "" if bar.deadline is None else duration(bar.deadline),
        )
        for bar in bars
    ]
    headings = ("round", "loss", "done", "late", "rejected", "needed", "time", "deadline")
    table = NumberTable(headings, thinned(rows))
    return Picture(title, _words(bars), width, top + 300 + below("round"), "".join(parts), table)


def _words(bars: Sequence[RoundBar]) -> str:
    totals = {state: sum(bar.counts.get(state, 0) for bar in bars) for state in COLOURS}
    totals_text = ", ".join(f"{count} {state}" for state, count in totals.items() if count)
    finite = [bar for bar in bars if math.isfinite(bar.loss)]
    ends = f"; loss from {short(finite[0].loss)} to {short(finite[-1].loss)}" if finite else ""
    return f"{len(bars)} rounds: {totals_text or 'no client so far'}{ends}"


def _dashes(colour: str) -> str:
    return element(
        *("line",),
        x1=-5,
        x2=6,
        y1=0,
        y2=0,
        stroke=colour,
        stroke_width=1.6,
        stroke_dasharray="3 2",
    )


def _named(box: Box, name: str) -> str:
    return label(box.left, box.top - 6, name, fill="muted", size=SMALL + 1)


@dataclass(frozen=True, slots=True)
class _Column:
    """One or several consecutive rounds that are drawn in one column."""

    number: float
    name: str
    loss: float
    """The loss of the column's last round."""
    low: float
    high: float
    counts: dict[str, float]
    """The mean number of clients in each state."""
    num_needed: int | None
    """The maximum over the column's rounds, as in the fields below."""
    seconds: float | None
    deadline: float | None


def _columns(bars: Sequence[RoundBar], size: int) -> list[_Column]:
    """Group the rounds into columns of `size` rounds each."""
    return [_column(bars[at : at + size]) for at in range(0, len(bars), max(size, 1))]


def _column(bars: Sequence[RoundBar]) -> _Column:
    first, last = bars[0].number, bars[-1].number
    losses = [bar.loss for bar in bars if math.isfinite(bar.loss)] or [math.nan]
    counts = {state: sum(bar.counts.get(state, 0) for bar in bars) for state in COLOURS}
    return _Column(
        (first + last) / 2,
        f"round {first}" if len(bars) == 1 else f"rounds {first} to {last}",
        *(losses[-1], min(losses), max(losses)),
        {state: count / len(bars) for state, count in counts.items()},
        max((bar.num_needed for bar in bars if bar.num_needed is not None), default=None),
        max((bar.seconds for bar in bars if bar.seconds is not None), default=None),
        max((bar.deadline for bar in bars if bar.deadline is not None), default=None),
    )


def _losses(columns: Sequence[_Column], x: Axis, box: Box) -> Iterator[str]:
    finite = [column for column in columns if math.isfinite(column.loss)]
    y = axis_of([v for column in finite for v in (column.low, column.high)], box.bottom, box.top)
    yield from y_grid(y, box, count=3)
    if any(column.high > column.low for column in finite):
        outline = [(x(column.number), y(column.high)) for column in finite]
        outline += [(x(column.number), y(column.low)) for column in reversed(finite)]
        yield element("path", d=f"{path_of(outline)}Z", fill="s1", fill_opacity="0.20")
    line = path_of([(x(column.number), y(column.loss)) for column in finite])
    yield element("path", d=line, fill="none", stroke="s1", stroke_width=1.8)
    if len(finite) <= 120:
        for point in finite:
            text = hint(f"{point.name}: loss {short(point.loss)}")
            yield element("circle", text, cx=x(point.number), cy=y(point.loss), r=2.8, fill="s1")


def _clients(columns: Sequence[_Column], x: Axis, box: Box) -> Iterator[str]:
    yield _named(box, "clients")
    most = max((max(sum(c.counts.values()), c.num_needed or 0) for c in columns), default=1)
    y = Axis(0.0, max(most, 1) * 1.05, box.bottom, box.top)
    for value in whole_steps(0, most, 3):
        yield element("line", x1=box.left, x2=box.right, y1=y(value), y2=y(value), stroke="grid")
        style: dict[str, Any] = {"fill": "muted", "anchor": "end", "size": SMALL + 1}
        yield label(box.left - 6, y(value) + 4, short(value), **style)
    wide = _wide(x, len(columns))
    for column in columns:
        below = 0.0
        for state, colour in COLOURS.items():
            count = column.counts.get(state, 0)
            if count:
                top, bottom = y(below + count), y(below)
                shape: dict[str, Any] = {"x": x(column.number) - wide / 2, "y": top, "width": wide}
                text = hint(f"{column.name}: {short(count)} {state}")
                high = max(bottom - top - 0.6, 0.6)
                yield element("rect", text, **shape, height=high, fill=colour)
            below += count
        if column.num_needed is not None:
            text_of = f"{column.num_needed} needed"
            yield _tick(x(column.number), y(column.num_needed), wide, "ink", text_of)


def _times(columns: Sequence[_Column], x: Axis, box: Box) -> Iterator[str]:
    yield _named(box, "time of a round")
    values = [v for c in columns for v in (c.seconds, c.deadline) if v is not None]
    y = Axis(0.0, max(values, default=1.0) * 1.08 or 1.0, box.bottom, box.top)
    yield from y_grid(y, box, count=2, form=duration)
    wide = _wide(x, len(columns))
    for column in columns:
        if column.seconds is not None:
            top = y(column.seconds)
            text = hint(f"{column.name}: {duration(column.seconds)}")
            shape: dict[str, Any] = {"x": x(column.number) - wide / 2, "y": top, "width": wide}
            high = max(box.bottom - top, 0.6)
            yield element("rect", text, **shape, height=high, fill="s6", fill_opacity="0.75")
        if column.deadline is not None:
            text_of = f"deadline {duration(column.deadline)}"
            yield _tick(x(column.number), y(column.deadline), wide, "bad", text_of)


def _wide(x: Axis, num_columns: int) -> float:
    return min(max((x.end - x.start) / max(num_columns, 1) * 0.72, 0.8), 34.0)


def _tick(x: float, y: float, wide: float, colour: str, text: str) -> str:
    half = wide / 2 + min(wide * 0.15, 3)
    return element(
        *("line", hint(text)),
        x1=x - half,
        x2=x + half,
        y1=y,
        y2=y,
        stroke=colour,
        stroke_width=1.6,
        stroke_dasharray="3 2",
    )


# ---- Histogram ----


def histogram(
    values: Sequence[float],
    *,
    title: str,
    name: str,
    form: Callable[[float], str] = short,
    width: int = 360,
    height: int = 194,
) -> Picture:
    """Draw a histogram of the finite values. name: the values' name, for the axis."""
    numbers = np.asarray(values, np.float64)  # there may be millions
    finite = np.sort(numbers[np.isfinite(numbers)])
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
        left_x, right_x = x(edges[at]), x(edges[at + 1])
        within = f"{form(edges[at])} to {form(edges[at + 1])}"
        rows.append((within, str(count)))
        if count:
            shape: dict[str, Any] = {
                "x": left_x + 1,
                "y": y(count),
                "width": max(right_x - left_x - 2, 1),
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
    """Return the edges of histogram bins of equal, round width that cover all values."""
    if not len(finite):
        return [0.0, 1.0]
    low, high = float(finite[0]), float(finite[-1])
    if low == high:
        return [low - (abs(low) * 0.05 or 0.5), low + (abs(low) * 0.05 or 0.5)]
    wanted = min(max(math.ceil(math.sqrt(len(finite))), 4), 24)
    edges = steps(low, high, wanted)
    size = edges[1] - edges[0] if len(edges) > 1 else high - low
    first = math.floor(low / size + 1e-9)
    last = math.ceil(high / size - 1e-9)
    return [at * size for at in range(first, max(last, first + 1) + 1)]
