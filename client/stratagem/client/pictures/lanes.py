"""Draw lanes (horizontal rows) of bars over time: time lines, members of a run, and decisions."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from stratagem.client.pictures.axes import (
    EDGE,
    Axis,
    Box,
    below,
    box_sign,
    duration,
    legend,
    time_steps,
    x_values,
)
from stratagem.client.pictures.svg import (
    NUM_SERIES,
    SMALL,
    NumberTable,
    Picture,
    decimal,
    element,
    hint,
    label,
    natural,
    series_colour,
    shortened,
    thinned,
    width_of,
)

# ---- Lanes ----

LANE_HEIGHT = 24
MAX_LANES_HEIGHT = 720
"""The largest height of all lanes in pixels; with more than 30 lanes, each becomes lower."""
MIN_LANE_HEIGHT = 2.0
MAX_ROWS = 1000
"""The largest number of lanes in a picture; if there are more, several are merged into one."""
MIN_NAME_HEIGHT = 13.0
MAX_NAME = 150.0
MAX_BARS = 400
"""The number of bars up to which each bar is a separate SVG element; more would slow browsers."""
THIN_PIXELS = 2
"""The width in pixels of a column of thin bars. With more than MAX_BARS bars, those up to twice as
wide share one SVG element per lane and colour, and those in one column are merged."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A time interval to draw in a lane, or an instant if it has no length."""

    lane: int
    start: float
    end: float
    colour: str
    text: str
    """The tooltip."""
    inside: str = ""
    """The text drawn inside the bar, if there is room."""
    ending: str = ""
    """The sign drawn at the bar's end, such as ✕."""
    count: int = 1


def merge_bars(bars: Sequence[Bar], x: Axis) -> list[Bar]:
    """Merge bars of one lane and colour that are too narrow and close to be told apart, so that at
    most one per pixel column is left."""
    pixel = (x.high - x.low) / (x.end - x.start)
    open_: dict[tuple[int, str], Bar] = {}
    done: list[Bar] = []
    for bar in sorted(bars, key=lambda item: (item.start, item.end)):
        key = bar.lane, bar.colour
        before = open_.get(key)
        if before is not None and _is_one(before, bar, pixel):
            end, count = max(before.end, bar.end), before.count + bar.count
            open_[key] = Bar(
                *(bar.lane, before.start, end, bar.colour, before.text, "", bar.ending, count)
            )
            continue
        if before is not None:
            done.append(before)
        open_[key] = bar
    return sorted([*done, *open_.values()], key=lambda item: (item.lane, item.start, item.end))


def _is_one(before: Bar, bar: Bar, pixel: float) -> bool:
    """Return whether two bars overlap, or are too close and narrow to be told apart."""
    if before.ending or bar.start - before.end >= pixel:
        return False
    is_covered = bar.end - before.end < pixel or bar.start - before.start < pixel
    return is_covered or min(bar.end - bar.start, before.end - before.start) < 3 * pixel


def _split_thin(bars: Sequence[Bar], x: Axis) -> tuple[list[Bar], list[list[Bar]]]:
    """Split bars into those that are drawn alone and groups of one lane and colour that share an
    SVG element: thin bars, if there are more than MAX_BARS in all."""
    wide: list[Bar] = []
    thin: dict[tuple[int, str], list[Bar]] = {}
    for bar in bars:
        is_wide = x(bar.end) - x(bar.start) > 2 * THIN_PIXELS or bool(bar.ending)
        if is_wide or len(bars) <= MAX_BARS:
            wide.append(bar)
        else:
            thin.setdefault((bar.lane, bar.colour), []).append(bar)
    return wide, list(thin.values())


def _thin(bars: Sequence[Bar], x: Axis, y: float, high: float) -> str:
    """Draw many thin bars of one lane and colour as a single SVG element."""
    gap = high * 5 / LANE_HEIGHT
    columns: dict[int, int] = {}
    for bar in bars:
        first, last = (int(x(time) / THIN_PIXELS) for time in (bar.start, bar.end))
        columns[first] = max(columns.get(first, 0), last + 1 - first)
    down = f"v{decimal(high - 2 * gap)}"
    data = "".join(
        f"M{at * THIN_PIXELS} {decimal(y + gap)}h{many * THIN_PIXELS}{down}h-{many * THIN_PIXELS}z"
        for at, many in columns.items()
    )
    text = f"{sum(bar.count for bar in bars)} thin ones, first: {bars[0].text}"
    return element("path", hint(text), d=data, fill=bars[0].colour, fill_opacity="0.82")


def lanes(
    names: Sequence[str],
    bars: Sequence[Bar],
    signs: Sequence[tuple[str, str]],
    *,
    width: int,
    end: float,
    form: Callable[[float], str] = duration,
    unit: str = "",
) -> tuple[str, int]:
    """Draw one lane per name; return the SVG content and its height. end: the last time on the
    axis, which begins at 0."""
    names, bars = _in_rows(names, bars)
    room = min(max((width_of(name) for name in names), default=0) + 16, MAX_NAME, width * 0.3)
    legend_text, top = legend(signs, 8, width)
    high = min(max(MAX_LANES_HEIGHT / max(len(names), 1), MIN_LANE_HEIGHT), LANE_HEIGHT)
    height = top + math.ceil(high * max(len(names), 1)) + 6 + below(unit)
    box = Box(room, top + 2, width - EDGE, height - 2 - below(unit))
    x = Axis(0.0, max(end, 1e-9), box.left, box.right)
    parts = [legend_text, *_names(names, box, high)]
    wide, thin = _split_thin(merge_bars(bars, x), x)
    for of_one in thin:
        parts.append(_thin(of_one, x, box.top + high * of_one[0].lane, high))
    for bar in wide:
        parts += _bar(bar, x, box.top + high * bar.lane, high)
    count = max(2, round((box.right - box.left) / 90))
    parts += x_values(x, box, time_steps(end, count), unit, form)
    return "".join(parts), height


def _in_rows(names: Sequence[str], bars: Sequence[Bar]) -> tuple[Sequence[str], Sequence[Bar]]:
    """Merge lanes until there are at most MAX_ROWS; each has the name of the first lane in it."""
    num_lanes = len(names)
    if num_lanes <= MAX_ROWS:
        return names, bars
    rows = [lane * MAX_ROWS // num_lanes for lane in range(num_lanes)]
    row_names = [""] * MAX_ROWS
    for name, row in zip(names, rows, strict=True):
        row_names[row] = row_names[row] or name
    return row_names, [replace(bar, lane=rows[bar.lane]) for bar in bars]


def _names(names: Sequence[str], box: Box, high: float) -> Iterator[str]:
    """Yield the SVG of the lanes' labels: a centre line per lane, and the lane's name if there is
    room. A lane without a name continues the lane above it."""
    free = -math.inf
    for at, name in enumerate(names):
        middle = box.top + high * (at + 0.5)
        if high >= MIN_NAME_HEIGHT:
            yield element("line", x1=box.left, x2=box.right, y1=middle, y2=middle, stroke="grid")
        if name and middle >= free:
            yield label(box.left - 8, middle + 4, shortened(name, box.left - 12), anchor="end")
            free = middle + MIN_NAME_HEIGHT


def _bar(bar: Bar, x: Axis, y: float, high: float) -> Iterator[str]:
    left_x, right_x = x(bar.start), x(bar.end)
    width = max(right_x - left_x, 2.0)
    text = bar.text if bar.count == 1 else f"{bar.count} in one, first: {bar.text}"
    gap = high * 5 / LANE_HEIGHT
    shape: dict[str, Any] = {"x": left_x, "y": y + gap, "width": width, "height": high - 2 * gap}
    round_: dict[str, Any] = {"rx": 3} if width > 6 and high == LANE_HEIGHT else {}
    yield element("rect", hint(text), **shape, **round_, fill=bar.colour, fill_opacity="0.82")
    middle = y + high / 2 + 3.5
    if bar.inside and width_of(bar.inside, SMALL) + 6 < width and high >= MIN_NAME_HEIGHT:
        size: dict[str, Any] = {"size": SMALL, "anchor": "middle", "weight": "600"}
        yield label(left_x + width / 2, middle, bar.inside, fill="surface", **size)
    if bar.ending:
        yield label(left_x + width + 1, middle + 0.5, bar.ending, fill="bad", size=13, weight="700")


# ---- Time line ----
#
# A time line shows events in lanes by kind, whatever their number.


@dataclass(frozen=True, slots=True)
class Span:
    """An activity on the time line, in seconds from the run's beginning: an interval, an instant
    (end equal to start), or several activities merged into one."""

    lane: str
    start: float
    end: float
    kind: str
    text: str = ""
    """The text about the activity; of merged activities, that of the first."""
    count: int = 1
    lasted: float | None = None
    """The total duration of the activities if several are merged."""

    @property
    def seconds(self) -> float:
        """Return the duration of the activity, or the total of merged ones."""
        return self.end - self.start if self.lasted is None else self.lasted


def time_line(
    spans: Sequence[Span], *, title: str, width: int = 720, end: float | None = None
) -> Picture:
    """Draw spans in the lanes that they name, in order of first mention, coloured by kind."""
    names = list(dict.fromkeys(span.lane for span in spans))
    kinds = list(dict.fromkeys(span.kind for span in spans))
    places, colours = (
        {n: i for i, n in enumerate(names)},
        {k: i for i, k in enumerate(k for k in kinds if k != AWAY)},
    )
    shades = {kind: series_colour(at) for kind, at in colours.items()} | {AWAY: "warn"}
    bars = [
        Bar(
            *(places[span.lane], span.start, span.end, shades[span.kind]),
            f"{span.text or span.kind}, {duration(span.end - span.start)}",
            inside=f"away {duration(span.seconds)}" if span.kind == AWAY else "",
            count=span.count,
        )
        for span in spans
    ]
    last = max((span.end for span in spans), default=0.0) if end is None else end
    signs = [(box_sign(shades[kind], fill_opacity="0.82"), kind) for kind in kinds]
    content, height = lanes(names, bars, signs, width=width, end=last)
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    times: defaultdict[tuple[str, str], float] = defaultdict(float)
    for span in spans:
        counts[span.lane, span.kind] += span.count
        times[span.lane, span.kind] += span.seconds
    rows = [(*key, str(count), duration(times[key])) for key, count in counts.items()]
    table = NumberTable(("lane", "what", "times", "in all"), thinned(rows))
    words = (
        f"{sum(counts.values())} in {len(names)} lanes within {duration(last)}: {', '.join(kinds)}"
    )
    return Picture(title, words, width, height, content, table)


# ---- Members ----
#
# Each worker has a lane, which also shows why its membership ended.


@dataclass(frozen=True, slots=True)
class Stay:
    """A time interval of a worker's membership in a party, in seconds from the run's beginning."""

    worker: str
    party: str
    """The path of the party, or of the task within the party; "" is the whole run."""
    start: float
    end: float | None
    """The end of the interval; None while the worker is a member."""
    ending: str = ""
    is_lost: bool = False
    task: str = ""
    """The worker's task for the party, such as "client 3"."""


AWAY: Final = "coordinator away"


def away_text(seconds: float) -> str:
    """Format the duration of a coordinator outage."""
    return f"{AWAY}, {duration(seconds)} at most"


def members(
    stays: Sequence[Stay],
    *,
    title: str,
    now: float,
    aways: Sequence[tuple[float, float]] = (),
    width: int = 720,
) -> Picture:
    """Draw a lane for each worker, and lanes below it for work that it did at the same time,
    coloured by party. now: the end of stays that last. aways: (start, end) of the coordinator's
    outages, in a lane above all others."""
    in_order = sorted(stays, key=lambda item: (natural(item.worker), item.start, item.party))
    names, places = _placed(in_order, now)
    parties = sorted({stay.party for stay in stays}, key=natural)
    colours = {party: series_colour(at) for at, party in enumerate(parties)}
    bars = [
        Bar(
            *(place, stay.start, now if stay.end is None else stay.end, colours[stay.party]),
            f"{stay.worker}{f', {stay.party}' if stay.party else ''}: {_stay_text(stay)}",
            inside=stay.task or stay.party,
            ending="✕" if stay.is_lost else "",
        )
        for place, stay in zip(places, in_order, strict=True)
    ]
    if aways:
        names = ["coordinator", *names]
        bars = [replace(bar, lane=bar.lane + 1) for bar in bars]
        bars += [
            Bar(0, *away, "warn", _away(away), inside=f"away {duration(away[1] - away[0])}")
            for away in aways
        ]
    signs = [
        (box_sign(colours[party], fill_opacity="0.82"), party or "member") for party in parties
    ]
    if len(parties) > NUM_SERIES:  # colours repeat, so the bars have texts
        signs = [(box_sign("s1", fill_opacity="0.82"), f"member of one of {len(parties)} parties")]
    if any(stay.is_lost for stay in stays):
        signs.append((label(-5, 5, "✕", fill="bad", size=13, weight="700"), "lost"))
    if aways:
        signs.append((box_sign("warn", fill_opacity="0.82"), AWAY))
    content, height = lanes(names, bars, signs, width=width, end=now)
    rows = [("coordinator", "", *map(duration, away), _away(away)) for away in aways] + [
        (
            *(stay.worker, stay.party or "the run", duration(stay.start)),
            "" if stay.end is None else duration(stay.end),
            _stay_text(stay),
        )
        for stay in in_order
    ]
    lost, workers = sum(stay.is_lost for stay in stays), len({stay.worker for stay in stays})
    words = f"{workers} workers within {duration(now)}; {lost or 'none'} lost"
    if aways:
        words += f"; {away_text(sum(end - start for start, end in aways))}"
    table = NumberTable(("worker", "of", "from", "to", "why it ended"), thinned(rows, 200))
    return Picture(title, words, width, height, content, table)


def _away(span: tuple[float, float]) -> str:
    return away_text(span[1] - span[0])


def _placed(stays: Sequence[Stay], now: float) -> tuple[list[str], list[int]]:
    """Assign each stay to the first free lane of its worker; return the names of the lanes, and the
    index of each stay's lane. stays: sorted by worker, then by time."""
    names: list[str] = []
    free: list[float] = []
    """The time from which on each lane of the present worker is free."""
    places: list[int] = []
    worker = None
    for stay in stays:
        if stay.worker != worker:
            worker, free = stay.worker, []
        lane = next((at for at, since in enumerate(free) if since <= stay.start), len(free))
        if lane == len(free):
            free.append(0.0)
            names.append("" if lane else stay.worker)
        free[lane] = now if stay.end is None else stay.end
        places.append(len(names) - len(free) + lane)
    return names, places


def _stay_text(stay: Stay) -> str:
    ending = "still a member" if stay.end is None and not stay.ending else stay.ending
    return f"{stay.task}, {ending}" if stay.task else ending


# ---- Decisions ----
#
# Each kind of decision of a strategy has a lane.


@dataclass(frozen=True, slots=True)
class DecisionMark:
    """A decision of a strategy, in seconds from the run's beginning."""

    after: float
    kind: str
    text: str = ""


def decisions(
    marks: Sequence[DecisionMark], *, title: str, end: float, width: int = 720
) -> Picture:
    """Draw a mark for each decision, in a lane per kind of it. end: the last time on the axis."""
    kinds = list(dict.fromkeys(mark.kind for mark in marks))
    bars = [
        Bar(
            *(at, mark.after, mark.after, series_colour(at)),
            f"{mark.text or mark.kind}, after {duration(mark.after)}",
        )
        for at, kind in enumerate(kinds)
        for mark in marks
        if mark.kind == kind
    ]
    content, height = lanes(kinds, bars, [], width=width, end=end)
    rows = [(duration(mark.after), mark.kind, mark.text) for mark in marks]
    last = f"; the newest: {marks[-1].text or marks[-1].kind}" if marks else ""
    words = f"{len(marks)} decisions within {duration(end)}{last}"
    table = NumberTable(("after", "what", "why"), thinned(rows, 200))
    return Picture(title, words, width, height, content, table)
