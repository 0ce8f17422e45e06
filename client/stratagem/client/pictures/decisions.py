"""What a strategy has decided, and when: a lane for each kind of decision."""

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.client.pictures.drawing.colours import series_colour
from stratagem.client.pictures.drawing.lanes import Bar, lanes
from stratagem.client.pictures.drawing.scales import duration
from stratagem.client.pictures.picture import NumberTable, Picture, thinned


@dataclass(frozen=True, slots=True)
class DecisionMark:
    """A decision, in seconds from the beginning."""

    after: float
    kind: str
    text: str = ""


def decisions(
    marks: Sequence[DecisionMark], *, title: str, end: float, width: int = 720
) -> Picture:
    """Return a mark for each decision. end: of the time that is shown."""
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
