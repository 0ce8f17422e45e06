"""Collect from a run's events the marks of its time line, merged so that they stay few, and the
results of its verification."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from stratagem.client.course.members import Outage
from stratagem.client.course.views import ENDS, Event, party_of, undone_from
from stratagem.client.pictures.lanes import AWAY, Span
from stratagem.client.pictures.parties import AgainExecuted, SegmentCheck
from stratagem.client.pictures.svg import natural
from stratagem.common.numerics.verification import Conclusion, share_of

MAX_MARKS: Final = 4096
"""The number of marks per kind and lane, which is more than a picture has columns of pixels. At
twice as many, marks that are too close to be told apart are merged."""
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
    "SegmentVerified": ("verification", "verified"),
    "SegmentRefuted": ("verification", "refuted"),
}
"""The lane and the text on the time line for each kind of event without duration."""


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
    "verification",
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


# ---- Verification ----

_RESULTS: Final[Mapping[str, str]] = {
    Conclusion.RUN: "refuted",
    Conclusion.VERIFIER: "verifier wrong",
}
"""The result of a refuted segment, keyed by conclusion; other conclusions end the verification."""


class ChecksFolding:
    """An incremental reader of a run's events that collects the results of its verification."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._sample = float((job.get("verification") or {}).get("sample") or 0.0)
        self._seed = int(job.get("seed") or 0)
        self._ends: dict[int, int] = {}
        """The last step of each committed segment, without partial commits."""
        self._checks: list[SegmentCheck] = []
        """The results so far, in order of time."""
        self._is_over = False
        """Nothing more is verified, because the run has ended or its bits are not reproducible."""

    def fold(self, event: Event) -> None:
        """Process the next event; events of parties below the root are ignored."""
        fact, last = event.payload, undone_from(event)
        if not self._sample or party_of(event):
            return
        if event.kind == "RunResumed":
            self._is_over = False
        if last is not None:
            self._ends = {number: end for number, end in self._ends.items() if number <= last}
        match event.kind:
            case "SegmentCommitted" if not fact.get("is_partial"):
                self._ends[fact["segment"]] = fact["step"]
            case "SegmentVerified":
                again = AgainExecuted(fact["workers"], is_right=True)
                self._add(fact, "verified", executions=(again,))
            case "SegmentRefuted":
                result = _RESULTS.get(fact["conclusion"], "open")
                self._is_over = self._is_over or result == "open"
                suspected = fact["quarantined"] or fact["marked"]
                self._add(fact, result, suspected=suspected, executions=(*_executions(fact),))
            case kind if kind in ENDS:
                self._is_over = True

    @property
    def checks(self) -> list[SegmentCheck]:
        """Return the state of verification of each segment, sorted by segment, then by time; empty
        if the job asks for no verification."""
        decided = {check.segment for check in self._checks if check.segment in self._ends}
        newest, start, rest = max(decided, default=0), 0, []
        for segment, end in self._ends.items():
            if segment not in decided:
                rest.append(SegmentCheck(segment, start, end, self._open(segment, newest)))
            start = end
        return sorted([*self._checks, *rest], key=lambda check: check.segment)

    def _open(self, segment: int, newest: int) -> str:
        """Return the result of an undecided segment. newest: the last segment with a decision."""
        if share_of(self._seed, segment) >= self._sample:
            return "not chosen"
        return "not verified" if self._is_over or segment < newest else "waits"

    def _add(self, fact: Mapping[str, Any], result: str, **details: Any) -> None:
        number = fact["segment"]
        before = (end for at, end in reversed(self._ends.items()) if at < number)
        check = SegmentCheck(number, next(before, 0), fact["step"], result, **details)
        self._checks.append(check)


def _executions(fact: Mapping[str, Any]) -> Iterator[AgainExecuted]:
    """Yield the further executions of a refuted segment, after that of the run."""
    run, *digests = fact.get("digests") or ("",)
    others = Counter(digest for digest in digests if digest != run).most_common(1)
    right = {Conclusion.RUN: dict(others), Conclusion.VERIFIER: {run: 1}}.get(fact["conclusion"])
    for workers, digest in zip(fact["workers"][1:], digests, strict=True):
        yield AgainExecuted(workers, digest in right if right else None)
