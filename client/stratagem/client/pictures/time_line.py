"""A time line: what happened when, in lanes, however much that was."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.client.pictures.drawing.colours import series_colour
from stratagem.client.pictures.drawing.frame import box_sign
from stratagem.client.pictures.drawing.lanes import Bar, lanes
from stratagem.client.pictures.drawing.scales import duration
from stratagem.client.pictures.members import AWAY
from stratagem.client.pictures.picture import NumberTable, Picture, thinned


@dataclass(frozen=True, slots=True)
class Span:
    """What took from one time to another, in seconds from the beginning; or an instant; or several
    of them, one behind or on another."""

    lane: str
    start: float
    end: float
    kind: str
    text: str = ""
    """Of several, what the first one was."""
    count: int = 1
    lasted: float | None = None
    """Of several, how long all of them took."""

    @property
    def seconds(self) -> float:
        """Return how long it took, or all of them did."""
        return self.end - self.start if self.lasted is None else self.lasted


def time_line(
    spans: Sequence[Span], *, title: str, width: int = 720, end: float | None = None
) -> Picture:
    """Return the spans in the lanes that they name, in order of first mention, coloured by kind."""
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
