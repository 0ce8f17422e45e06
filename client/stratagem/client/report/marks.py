"""Collect the marks of a run's time line: few, however many events there are."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from stratagem.client.course.members import Outage
from stratagem.client.course.views import Event, party_of
from stratagem.client.pictures.lanes import AWAY, Span
from stratagem.client.pictures.svg import natural

MAX_MARKS: Final = 4096
"""The number of marks of one kind and lane, more than a picture has columns; at twice as many,
marks that no picture can tell apart are merged."""
MAX_LANES: Final = 12
"""The largest number of parties with lanes of their own; further parties share one lane."""
_TRAINING: Final = "training"
_INSTANTS: Final = {
    "MembersFormed": ("members", "members formed"),
    "ProcessDied": ("members", "process died"),
    "SegmentCommitted": ("commits", "commit"),
    "Evaluated": ("commits", "evaluation"),
    "RoundClosed": ("rounds", "round closed"),
    "UpdateRejected": ("rounds", "update rejected"),
    "GenerationClosed": ("generations", "generation closed"),
}
"""For each kind of instant event, its lane and its text."""


COORDINATOR: Final = "coordinator"
_LANES: Final = (
    COORDINATOR,
    "members",
    _TRAINING,
    "",
    "clients",
    "rounds",
    "generations",
    "commits",
)
"""The lanes from top to bottom; "" stands for the lanes of parties."""


def _in_order(span: Span) -> tuple[int, tuple[tuple[str, int], ...]]:
    place = _LANES.index(span.lane) if span.lane in _LANES else _LANES.index("")
    return place, natural(span.lane)


class TimeMarks:
    """An incremental reader of a run's events that collects the time line's marks."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, str], list[Span]] = {}
        """The marks, keyed by (lane, kind), in order of first mention."""
        self._parties: set[str] = set()

    def fold(self, event: Event, began_s: float) -> None:
        """Process the next event. began_s: the wall time at which the run began."""
        at = event.time_s - began_s
        if event.kind in ("SegmentFinished", "UpdateReceived"):
            start, party = max(at - float(event.payload["seconds"]), 0.0), party_of(event)
            if event.kind == "UpdateReceived":
                self._add(Span("clients", start, at, "client", event.sentence))
            else:
                self._parties.add(party)
                self._add(Span(party or _TRAINING, start, at, _TRAINING, event.sentence))
        elif event.kind in _INSTANTS:
            lane, words = _INSTANTS[event.kind]
            self._add(Span(lane, at, at, words, event.sentence))

    def add_outage(self, outage: Outage, began_s: float) -> None:
        """Add a mark for a coordinator outage."""
        start, end = outage.began_s - began_s, outage.ended_s - began_s
        self._add(Span(COORDINATOR, start, end, AWAY))

    @property
    def spans(self) -> list[Span]:
        """Return the marks so far, sorted by lane, then by time."""
        spans = [span for of_one in self._marks.values() for span in of_one]
        if len(self._parties) > MAX_LANES:
            spans = [replace(s, lane=_TRAINING) if s.kind == _TRAINING else s for s in spans]
        return sorted(spans, key=_in_order)

    def _add(self, span: Span) -> None:
        marks = self._marks.setdefault((span.lane, span.kind), [])
        marks.append(span)
        if len(marks) > 2 * MAX_MARKS:
            marks[:] = merge_spans(marks, span.end / MAX_MARKS)


def merge_spans(spans: Iterable[Span], column_s: float) -> list[Span]:
    """Merge marks of one kind and lane that overlap or lie within column_s seconds."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda one_span: (one_span.start, one_span.end)):
        before = merged[-1] if merged else None
        if before is None or not _are_one(before, span, column_s):
            merged.append(span)
            continue
        merged[-1] = Span(  # there may be very many: replace() takes four times as long
            before.lane,
            before.start,
            max(before.end, span.end),
            before.kind,
            before.text,
            before.count + span.count,
            before.seconds + span.seconds,
        )
    return merged


def _are_one(before: Span, span: Span, column_s: float) -> bool:
    if span.start - before.end >= column_s:
        return False
    shorter = min(span.end - span.start, before.end - before.start)
    return shorter < 3 * column_s or span.start < before.end - column_s
