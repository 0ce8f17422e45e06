"""A time line: what happened when, in lanes, however much that was."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.client.pictures.drawing.colours import series_colour
from stratagem.client.pictures.drawing.frame import box_sign
from stratagem.client.pictures.drawing.lanes import Bar, lanes
from stratagem.client.pictures.drawing.scales import duration
from stratagem.client.pictures.picture import NumberTable, Picture, thinned


@dataclass(frozen=True, slots=True)
class Span:
    """What took from one time to another, in seconds from the beginning; or an instant."""

    lane: str
    start: float
    end: float
    kind: str
    text: str = ""


def time_line(
    spans: Sequence[Span], *, title: str, width: int = 720, end: float | None = None
) -> Picture:
    """Return the spans in the lanes that they name, in order of first mention, coloured by kind."""
    names = list(dict.fromkeys(span.lane for span in spans))
    kinds = list(dict.fromkeys(span.kind for span in spans))
    places, colours = {n: i for i, n in enumerate(names)}, {k: i for i, k in enumerate(kinds)}
    bars = [
        Bar(
            *(places[span.lane], span.start, span.end, series_colour(colours[span.kind])),
            f"{span.text or span.kind}, {duration(span.end - span.start)}",
        )
        for span in spans
    ]
    last = max((span.end for span in spans), default=0.0) if end is None else end
    signs = [(box_sign(series_colour(at), fill_opacity="0.82"), k) for at, k in enumerate(kinds)]
    content, height = lanes(names, bars, signs, width=width, end=last)
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    times: defaultdict[tuple[str, str], float] = defaultdict(float)
    for span in spans:
        counts[span.lane, span.kind] += 1
        times[span.lane, span.kind] += span.end - span.start
    rows = [(*key, str(count), duration(times[key])) for key, count in counts.items()]
    table = NumberTable(("lane", "what", "times", "in all"), thinned(rows))
    words = f"{len(spans)} in {len(names)} lanes within {duration(last)}: {', '.join(kinds)}"
    return Picture(title, words, width, height, content, table)
