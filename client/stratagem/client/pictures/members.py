"""Members of a run: a lane for each worker, and why it was a member no longer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from stratagem.client.pictures.drawing.colours import NUM_SERIES, series_colour
from stratagem.client.pictures.drawing.frame import box_sign
from stratagem.client.pictures.drawing.lanes import Bar, lanes
from stratagem.client.pictures.drawing.order import natural
from stratagem.client.pictures.drawing.scales import duration
from stratagem.client.pictures.drawing.svg import label
from stratagem.client.pictures.picture import NumberTable, Picture, thinned


@dataclass(frozen=True, slots=True)
class Stay:
    """A stretch of time, in seconds from the beginning, in which a worker was a member."""

    worker: str
    party: str
    """Whose member it was, or what it did; "" is the whole run."""
    start: float
    end: float | None
    """None: it is one now."""
    ending: str = ""
    is_lost: bool = False
    task: str = ""
    """What it did for the party, such as "client 3"."""


AWAY: Final = "coordinator away"


def away_text(seconds: float) -> str:
    """Return how long the coordinator was away, in words."""
    return f"{AWAY}, {duration(seconds)} at most"


def members(
    stays: Sequence[Stay],
    *,
    title: str,
    now: float,
    aways: Sequence[tuple[float, float]] = (),
    width: int = 720,
) -> Picture:
    """Return a lane for each worker, and further ones below it for what it did at the same time;
    parties have colours of their own. now: the time until which those are drawn that have not
    ended. aways: from when until when the coordinator was away, in a lane of its own above."""
    in_order = sorted(stays, key=lambda each: (natural(each.worker), each.start, each.party))
    names, places = _placed(in_order, now)
    parties = sorted({stay.party for stay in stays}, key=natural)
    colours = {party: series_colour(at) for at, party in enumerate(parties)}
    bars = [
        Bar(
            *(place, stay.start, now if stay.end is None else stay.end, colours[stay.party]),
            f"{stay.worker}{f', {stay.party}' if stay.party else ''}: {_told(stay)}",
            inside=stay.task or stay.party,
            ending="✕" if stay.is_lost else "",
        )
        for place, stay in zip(places, in_order, strict=True)
    ]
    if aways:
        names = ["coordinator", *names]
        bars = [replace(bar, lane=bar.lane + 1) for bar in bars]
        bars += [Bar(0, *each, "warn", _away(each), inside=_short(each)) for each in aways]
    signs = [
        (box_sign(colours[party], fill_opacity="0.82"), party or "member") for party in parties
    ]
    if len(parties) > NUM_SERIES:  # colours repeat: what is written in the bars tells them apart
        signs = [(box_sign("s1", fill_opacity="0.82"), f"member of one of {len(parties)} parties")]
    if any(stay.is_lost for stay in stays):
        signs.append((label(-5, 5, "✕", fill="bad", size=13, weight="700"), "lost"))
    if aways:
        signs.append((box_sign("warn", fill_opacity="0.82"), AWAY))
    content, height = lanes(names, bars, signs, width=width, end=now)
    rows = [("coordinator", "", *map(duration, each), _away(each)) for each in aways] + [
        (
            *(stay.worker, stay.party or "the run", duration(stay.start)),
            "" if stay.end is None else duration(stay.end),
            _told(stay),
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


def _short(span: tuple[float, float]) -> str:
    return f"away {duration(span[1] - span[0])}"


def _placed(stays: Sequence[Stay], now: float) -> tuple[list[str], list[int]]:
    """Return the names of lanes and the lane of each stay: the first one of its worker that is
    free. stays: by worker, then in order of time."""
    names: list[str] = []
    free: list[float] = []
    """By lane of the worker, from when on."""
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


def _told(stay: Stay) -> str:
    ending = "still a member" if stay.end is None and not stay.ending else stay.ending
    return f"{stay.task}, {ending}" if stay.task else ending
