"""Reduce a run's events, one by one, to the data that its pictures need.

Reading can continue with later events: no event is read twice, and none is kept.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Final, Self

import numpy as np

from stratagem.client.course.client_sums import FederatedClient
from stratagem.client.course.members import MembersFolding, OutagesFolding
from stratagem.client.course.population import PopulationFolding
from stratagem.client.course.rounds import Home, Round, RoundsFolding, fold_benches, homes, of_sums
from stratagem.client.course.step_history import StepSeries
from stratagem.client.course.views import (
    Event,
    RunStatus,
    is_of_verifier,
    number,
    numbers,
    party_of,
    undone_from,
)
from stratagem.client.pictures.curves import Line
from stratagem.client.report.marks import ChecksFolding, TimeMarks
from stratagem.common.base.text import CLIENT_MAX, CLIENT_MEAN, CLIENT_MIN, of_metric
from stratagem.common.history import Columns
from stratagem.common.history.columns import Floats, Ints, shortened
from stratagem.common.history.recording import PREFIX, party_of_stage

# ---- Course ----

MAX_DECISIONS: Final = 1000


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision that a custom strategy has recorded."""

    after_s: float
    """The time of the decision, in seconds since the run's beginning."""
    party: str
    kind: str
    """The kind of decision, as named by the strategy."""
    reason: str


class PartyCourse:
    """The data of one party that pictures need, built up from events."""

    def __init__(self, party: str) -> None:
        self._lines, self._rounds = LinesFolding(party), RoundsFolding(party)
        self._party = party
        self._roster: dict[int, Home] = {}
        self._benches: dict[int, int] = {}
        self.ranks: tuple[int, ...] = ()
        """The rank of each pipeline stage in the newest membership."""
        self.worker_ids: tuple[str, ...] = ()
        """The workers of the newest non-empty membership."""
        self.engine = ""
        self.num_segments = 0
        """The number of finished segments; for a silo (a client that is a party), in all rounds."""
        self.failure = ""
        """The reason for the party's failure, as a sentence; empty if it has not failed."""
        self.reached: list[tuple[float, int]] = []
        """The (wall time, step) at the end of each segment; both ascend."""

    @property
    def lines(self) -> dict[str, Line]:
        """Return the party's metrics as lines of curves, keyed by name."""
        return self._lines.lines

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Return the rounds of the party if it is a federation; else none."""
        return self._rounds.rounds

    @property
    def clients(self) -> tuple[FederatedClient, ...]:
        """Return the summaries of the party's clients if it is a federation; else none."""
        return of_sums(self._rounds.sums, self._rounds.number, self._roster, self._benches)

    @property
    def client_times(self) -> Sequence[float]:
        """Return the durations of all updates of the federation's clients."""
        return self._rounds.times

    def fold(self, event: Event) -> None:
        """Process the next event of the run, which may be about any party."""
        self._lines.fold(event)
        self._rounds.fold(event)
        fold_benches(self._benches, event, self._party)

    def fold_own(self, event: Event) -> None:
        """Process the next event that is about this party itself."""
        match event.kind:
            case "RosterFormed" | "ClientsJoined":
                self._roster |= homes(event)
            case "MembersFormed" if event.payload["members"]:
                self.ranks = tuple(event.payload.get("ranks") or ())
                members = event.payload["members"]
                self.worker_ids = tuple(member["worker_id"] for member in members)
            case "SegmentFinished":
                self.engine = str(event.payload["engine"])
                self.num_segments += 1
                at, step = self.reached[-1] if self.reached else (0.0, 0)
                self.reached.append((max(at, event.time_s), max(step, event.payload["step"])))
            case "PartyFailed":
                self.failure = event.sentence


class RunCourse:
    """The data of a whole run that pictures need, built up from events."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        """Begin without events. job: the run's job, as in its status."""
        self._job = job
        self.num_events = self.num_returns = 0
        """The number of events read, and how many of them returned the run to an earlier commit."""
        self.began_s: float | None = None
        """The wall time of the first event; None before there is one."""
        self.newest_s = 0.0
        """The wall time of the newest event."""
        self.parties: dict[str, PartyCourse] = {"": PartyCourse("")}
        """The parties, keyed by path, in order of first mention; "" is the root."""
        self.members = MembersFolding()
        self.population = PopulationFolding(job)
        """The generations, if the whole run is a population."""
        self.populations: dict[str, PopulationFolding] = {"": self.population}
        """The generations of all populations, keyed by the path of their party."""
        self.time_marks, self.outages = TimeMarks(), OutagesFolding()
        self.verification = ChecksFolding(job)
        self.decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        """The newest decisions of a custom strategy."""

    @classmethod
    def of(cls, events: Iterable[Event], job: Mapping[str, Any]) -> Self:
        """Build the course of a run from its events."""
        course = cls(job)
        course.take(events)
        return course

    def take(self, events: Iterable[Event]) -> None:
        """Process further events, which must follow those already read."""
        for event in events:
            self._fold(event)

    @property
    def root(self) -> PartyCourse:
        """Return the data of the root party, which is the whole run."""
        return self.parties[""]

    def _fold(self, event: Event) -> None:
        self.num_events += 1
        self.began_s = event.time_s if self.began_s is None else self.began_s
        self.newest_s = event.time_s
        outage = self.outages.fold(event)
        if outage is not None:
            self.time_marks.add_outage(outage, self.began_s)
        if is_of_verifier(event):
            return
        party = party_of(event)
        if party not in self.parties:
            self.parties[party] = PartyCourse(party)
        concerned: Sequence[PartyCourse] = [self.parties[party]]
        if event.kind == "RunResumed":
            self.num_returns += 1
            concerned = list(self.parties.values())
        for party_course in concerned:
            party_course.fold(event)
        self.parties[party].fold_own(event)
        self.members.fold(event)
        if event.kind == "PopulationFormed" and party not in self.populations:
            self.populations[party] = PopulationFolding(self._job, party)
        for of_one in {party, party.rpartition("/")[0]} & self.populations.keys():
            self.populations[of_one].fold(event)
        self.verification.fold(event)
        self.time_marks.fold(event, self.began_s)
        if event.kind == "Noted":
            kind, reason = str(event.payload["kind"]), str(event.payload.get("reason") or "")
            self.decisions.append(Decision(event.time_s - self.began_s, party, kind, reason))


# ---- Values ----
#
# A report needs the status of a run and its events.


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """All that is needed to display a run: status, course and step history."""

    status: RunStatus
    course: RunCourse
    history: Mapping[str, StepSeries] = field(default_factory=dict)
    """The step history; without it, curves have one value per segment."""
    events: Sequence[Event] = ()
    """All events, to list in a report; pictures do not need them."""

    @classmethod
    def of(
        cls,
        status: RunStatus,
        events: Sequence[Event],
        history: Mapping[str, StepSeries] | None = None,
    ) -> Self:
        """Build a ReportedRun from a run's status, events and step history; its `events` are
        without those of the verifier."""
        of_run = [event for event in events if not is_of_verifier(event)]
        return cls(status, RunCourse.of(events, status.job), history or {}, of_run)

    @property
    def job(self) -> Mapping[str, Any]:
        """Return the run's job."""
        return self.status.job

    @property
    def strategy(self) -> Mapping[str, Any]:
        """Return the strategy of the job; empty for a job that trains nothing."""
        return self.job.get("strategy") or {}

    @property
    def began_s(self) -> float:
        """Return the wall time of the first event."""
        began_s = self.course.began_s
        return self.status.submitted_at_s if began_s is None else began_s

    @property
    def seconds(self) -> float:
        """Return the time from the first to the newest event."""
        return self.course.newest_s - self.began_s if self.course.num_events else 0.0


# ---- Curves from facts ----
#
# Each curve has one value for each segment or round that has ended.

_TRAIN = "train.loss"
_RATE = "train.lr"
_COUNTED = ("train.loss_", "stop.", "plateau.", "train.skipped_steps")
"""The prefixes of metrics without a curve: spreads, and counters that the coordinator keeps."""

_GRAD_NORM = "train.grad_norm"
_OWN = ("train.", "time.")
"""The prefixes of the whole run's series; others begin with a stage, node or replica."""
RECORDED = ("train.*", "time.rows_per_s")
"""The recorded series that are drawn as curves."""

MAX_POINTS = 4096
"""The largest number of points per line; longer lines are merged into rows."""
MAX_PARTS = 16
"""The largest number of stages, nodes or replicas of a party whose series are read."""
_OF_STAGES = ("busy_s", "span_s", "memory_bytes")


def recorded(job: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the (series, parties) of the step history to read for a run's pictures: those of the
    whole run, and of its pipeline stages, gossip nodes or replicas."""
    strategy = job.get("strategy") or {}
    aggregation = (strategy.get("aggregation") or {}).get("method")
    if num_replicas_apart(strategy):
        return RECORDED, ("", *(f"replica/{number}" for number in range(MAX_PARTS)))
    if strategy.get("type") == "DataParallel":
        inner = (strategy.get("options") or {}).get("inner") or {}
        strategy = inner if inner.get("type") == "ModelParallel" else strategy
    if strategy.get("type") == "ModelParallel":
        names = (f"stage/{stage}" for stage in range(MAX_PARTS))
        stages = (party_of_stage(stage) for stage in range(MAX_PARTS))
        return (*RECORDED, *_OF_STAGES, f"{PREFIX}*"), ("", *names, *stages)
    if aggregation == "Decentralized":
        return RECORDED, ("", *(f"node/{node}" for node in range(MAX_PARTS)))
    return RECORDED, ()


def num_replicas_apart(strategy: Mapping[str, Any]) -> int:
    """Return the number of replicas with local steps under this strategy; 0 if there are none."""
    takes_them = (strategy.get("options") or {}).get("local_steps") is not None
    is_theirs = strategy.get("type") == "DataParallel" and takes_them
    return int(strategy.get("num_replicas") or 0) if is_theirs else 0


class LinesFolding:
    """An incremental reader of a run's events that builds the lines of one party's metrics; the
    step of a federation's round is its number.

    Segments undone by a resumption from an earlier commit are left out. Values of training make
    lines, values of evaluations dots.
    """

    def __init__(self, party: str = "") -> None:
        self._party = party
        self._values: dict[str, dict[int, float]] = {}
        """The values of each metric, keyed by segment."""
        self._steps: dict[int, int] = {}
        """The last step of each segment."""

    @property
    def lines(self) -> dict[str, Line]:
        """Return the lines so far, keyed by metric; its spread over clients is the line's band."""
        lines = {name: _line(name, points, self._steps) for name, points in self._values.items()}
        return {
            name: _with_band(line, lines) for name, line in lines.items() if of_metric(name) == name
        }

    def fold(self, event: Event) -> None:
        """Process the next event of the run."""
        last = undone_from(event)
        if last is not None:
            for name, points in self._values.items():
                self._values[name] = {n: value for n, value in points.items() if n <= last}
        if party_of(event) != self._party:
            return
        fact = event.payload
        match event.kind:
            case "SegmentFinished" | "SegmentCommitted":
                self._steps[fact["segment"]] = fact["step"]
                self._add(fact["segment"], fact["step"], fact)
            case "Evaluated":
                segment = fact["segment"]
                self._add(segment, self._steps.setdefault(segment, segment), fact)
            case "GenerationClosed":
                self._steps[fact["generation"]] = fact["step"]
                self._add(fact["generation"], fact["step"], fact)

    def _add(self, segment: int, step: int, fact: Mapping[str, object]) -> None:
        values = numbers(fact.get("metrics"))
        if step and "loss" in fact:
            values[_TRAIN] = number(fact["loss"])
        for name, value in values.items():
            if not name.startswith(_COUNTED):
                self._values.setdefault(name, {})[segment] = value


def num_nodes(job: Mapping[str, Any]) -> int:
    """Return the number of gossip nodes of a job; 0 if its strategy does not gossip."""
    strategy = job.get("strategy") or {}
    gossips = (strategy.get("aggregation") or {}).get("method") == "Decentralized"
    return int(strategy.get("num_replicas") or 0) if gossips else 0


def with_history(
    lines: Mapping[str, Line], history: Mapping[str, StepSeries], nodes: int = 0
) -> dict[str, Line]:
    """Replace lines with a value per segment by those of the step history, where they are recorded.

    nodes: the number of gossip nodes. A step's loss is then the plain mean over all nodes, if the
    history has all of them.
    """
    recorded_lines = {
        name: recorded_line(name, series)
        for name, series in history.items()
        if len(series.step) and name.startswith(_OWN)
    }
    of_nodes = [history.get(f"node/{node}:{_TRAIN}") for node in range(nodes)]
    series_of_nodes = [series for series in of_nodes if series is not None]
    mean = mean_line(_TRAIN, series_of_nodes) if len(series_of_nodes) == nodes else None
    if mean is not None:
        recorded_lines[_TRAIN] = mean
    merged = {**lines, **recorded_lines}
    if _GRAD_NORM in recorded_lines:
        merged.pop("train.max_grad_norm", None)  # the band shows it
    return merged


def mean_line(name: str, of_each: Sequence[StepSeries]) -> Line | None:
    """Return the plain mean of several series at their common steps, with a band from minimum to
    maximum; None if they have no step in common."""
    if not of_each:
        return None
    common = reduce(np.intersect1d, [series.step for series in of_each])
    if not len(common):
        return None
    rows = [np.searchsorted(series.step, common) for series in of_each]
    last, low, high = (
        np.stack([column[at] for column, at in zip(columns, rows, strict=True)])
        for columns in zip(*((s.last, s.min, s.max) for s in of_each), strict=True)
    )
    means = [math.fsum(values) / len(of_each) for values in last.T]
    certain = [series.step[~series.provisional] for series in of_each]
    until = min(float(steps[-1]) if len(steps) else 0.0 for steps in certain)
    least, greatest = np.min(low, axis=0).tolist(), np.max(high, axis=0).tolist()
    return Line(name, common.tolist(), means, least, greatest, provisional_from=until)


def recorded_line(name: str, series: StepSeries) -> Line:
    """Convert a recorded series to a line with this name."""
    certain = series.step[~series.provisional]
    values = (series.step, series.last, series.min, series.max)
    step, last, low, high = (column.tolist() for column in values)
    until = float(certain[-1]) if len(certain) else 0.0
    return Line(name, step, last, low, high, provisional_from=until)


def _line(name: str, points: Mapping[int, float], steps_of: Mapping[int, int]) -> Line:
    """Make a line from values keyed by segment; steps_of: the last step of each segment."""
    by_step = ((steps_of[segment], value) for segment, value in points.items())
    in_order = sorted(by_step, key=lambda point: point[0])
    dots = not name.startswith("train.")
    steps, values = [step for step, _ in in_order], [value for _, value in in_order]
    if len(in_order) <= MAX_POINTS:
        return Line(name, steps, values, dots=dots)
    rows = _few(np.array(steps), np.array(values))
    step, last, low, high = (column.tolist() for column in rows.arrays[:4])
    return Line(name, step, last, low, high, dots=dots)


def _with_band(line: Line, lines: Mapping[str, Line]) -> Line:
    metric = line.name.removesuffix(f".{CLIENT_MEAN}")
    low, high = (lines.get(f"{metric}.{end}") for end in (CLIENT_MIN, CLIENT_MAX))
    if low is None or high is None or not line.step == low.step == high.step:
        return line  # the rows may differ, and some rounds may have no spread
    return replace(line, low=low.last, high=high.last)


def _few(steps: Ints, values: Floats) -> Columns:
    """Merge values into at most MAX_POINTS rows, which keep last, minimum and maximum."""
    is_finite = np.isfinite(values)
    finite = np.where(is_finite, values, np.nan)
    counts, others = is_finite.astype(np.int64), (~is_finite).astype(np.int64)
    rows = Columns(steps, finite, finite, finite, counts, others)
    return shortened(rows, 1, MAX_POINTS)[0]


def groups(lines: Mapping[str, Line]) -> list[tuple[str, list[Line]]]:
    """Group lines into frames (pictures): all losses share one, and each other metric has its own.

    The frames are sorted: loss, evaluations, values of training, times.
    """
    frames: dict[str, list[Line]] = {}
    for name in sorted(lines, key=_rank):
        rate = name.startswith(f"{_RATE}.") or name == _RATE
        frame = "loss" if name.endswith(".loss") else _RATE if rate else name
        frames.setdefault(frame, []).append(lines[name])
    return list(frames.items())


def _rank(name: str) -> tuple[int, str]:
    # The colour of the training loss is the first one.
    if name.endswith(".loss"):
        return (0 if name == _TRAIN else 1), name
    return (4 if name.startswith("time.") else 3 if name.startswith("train.") else 2), name
