"""Members of a run: a lane for each worker, and why it was a member no longer."""

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.client.pictures.drawing.colours import series_colour
from stratagem.client.pictures.drawing.frame import box_sign
from stratagem.client.pictures.drawing.lanes import Bar, lanes
from stratagem.client.pictures.drawing.scales import duration
from stratagem.client.pictures.drawing.svg import label
from stratagem.client.pictures.picture import NumberTable, Picture


@dataclass(frozen=True, slots=True)
class Stay:
    """A stretch of time, in seconds from the beginning, in which a worker was a member."""

    worker: str
    party: str
    start: float
    end: float | None
    """None: it is one now."""
    ending: str = ""
    is_lost: bool = False


def members(stays: Sequence[Stay], *, title: str, now: float, width: int = 720) -> Picture:
    """Return a lane for each worker; parties have colours of their own. now: the time until which
    those are drawn that have not ended."""
    names = sorted({stay.worker for stay in stays}, key=_natural)
    parties = list(dict.fromkeys(stay.party for stay in stays))
    places, colours = {n: i for i, n in enumerate(names)}, {p: i for i, p in enumerate(parties)}
    bars = [
        Bar(
            *(places[stay.worker], stay.start, now if stay.end is None else stay.end),
            series_colour(colours[stay.party]),
            f"{stay.worker}{f' in {stay.party}' if stay.party else ''}: {_ending(stay)}",
            inside=stay.party,
            ending="✕" if stay.is_lost else "",
        )
        for stay in stays
    ]
    signs = [
        (box_sign(series_colour(at), fill_opacity="0.82"), party or "member")
        for at, party in enumerate(parties)
    ]
    if any(stay.is_lost for stay in stays):
        signs.append((label(-5, 5, "✕", fill="bad", size=13, weight="700"), "lost"))
    content, height = lanes(names, bars, signs, width=width, end=now)
    rows = tuple(
        (
            *(stay.worker, stay.party or "the run", duration(stay.start)),
            "" if stay.end is None else duration(stay.end),
            _ending(stay),
        )
        for stay in sorted(stays, key=lambda each: (_natural(each.worker), each.start))
    )
    lost = sum(stay.is_lost for stay in stays)
    words = f"{len(names)} workers within {duration(now)}; {lost or 'none'} lost"
    table = NumberTable(("worker", "of", "from", "to", "why it ended"), rows)
    return Picture(title, words, width, height, content, table)


def _ending(stay: Stay) -> str:
    return "still a member" if stay.end is None else stay.ending


def _natural(name: str) -> tuple[str, int, str]:
    """Return what names are ordered by: worker-2 before worker-10."""
    head = name.rstrip("0123456789")
    digits = name[len(head) :]
    return head, int(digits) if digits else -1, name
