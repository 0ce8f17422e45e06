"""The coordinator's state: frozen values made by folding facts, and nothing derived."""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stratagem.common.base.ids import NO_DIGEST, Digest, Party, RunId, WorkerId
from stratagem.common.job import JobSpec
from stratagem.common.numerics import rules
from stratagem.coordinator.core.facts import Capability, ErrorRecord, Member
from stratagem.coordinator.core.persistent import PersistentMap, PersistentOrder

if TYPE_CHECKING:  # both are made of what stands here
    from stratagem.coordinator.core.strategy_contract import Strategies, Strategy


K = TypeVar("K", bound=str)


class RunPhase(StrEnum):
    PENDING = "PENDING"
    PLACING = "PLACING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        return self in (RunPhase.COMPLETED, RunPhase.FAILED, RunPhase.CANCELLED)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as last registered; is_alive is False once its lease has expired."""

    member: Member
    address: str
    capability: Capability
    is_alive: bool = True
    is_draining: bool = False
    reason: str = ""
    is_blameless: bool = False
    """True when it was lost before it had begun the work it was given."""
    lost_s: float = 0.0
    """Leader-clock time of its loss, where it is not alive."""
    beat_s: float = 0.0
    """Leader-clock time at which it was heard of last, where it is not alive: of its last beat, or
    of its loss where another reason was known before its silence."""
    registered_s: float = 0.0
    """Leader-clock time at which it last said that it takes work."""

    @property
    def is_usable(self) -> bool:
        return self.is_alive and not self.is_draining


@dataclass(frozen=True, slots=True)
class CommittedState:
    segment: int
    step: int
    digest: Digest
    metrics: Mapping[str, float] = field(default_factory=dict)
    streams: str = ""
    """See effects.Base."""
    average: Digest = NO_DIGEST
    """See effects.Base."""
    is_partial: bool = False
    """What only one worker each has is on the workers."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    run_id: RunId
    job: JobSpec
    strategy: "Strategy"
    """The strategy that runs the job, from the table of this process."""
    value: Any
    """The strategy's own run value; only the strategy's file looks inside."""
    ended: RunPhase | None = None
    """COMPLETED, FAILED or CANCELLED once the run has ended."""
    reason: str = ""
    error: ErrorRecord | None = None
    commits: tuple[CommittedState, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    predictions: Digest | None = None
    """The outputs of a model that was only evaluated."""
    engine: str = ""
    submitted_wall_s: float = 0.0
    submitted_by: str = ""
    """Shown to people; empty when not known."""
    submission: str = ""
    """See RunSubmitted."""
    owner: str = ""
    """The owner, who may stop, resume and delete the run without the scope admin."""
    traceparent: str = ""
    """See RunSubmitted."""
    numerics: int = 1
    """See RunSubmitted."""
    changed_s: float = 0.0
    """Leader-clock time of the newest fact."""
    num_facts: int = 0
    """Facts journaled so far, which is the index of the next one."""
    num_hidden: int = 0
    """Of these, the facts that no reader gets; see core/strategy_calls.py."""
    is_released: bool = True
    """False while workers may hold sessions of the run."""
    is_reproducible: bool = True
    num_returns: int = 0
    """How often it was resumed from an earlier commit: the same facts may happen again."""
    touched: frozenset[Member] = frozenset()
    """Members that were given a session and have not been released. Those that have left, or whose
    worker has started anew, are dropped while the run is active."""
    rows: Mapping[Party, str] = field(default_factory=dict)
    """Some rows of the data, as they were when the model of a party was built."""
    has_raised: bool = False
    """Its strategy has raised when a fact was folded, which stands in no fact: another version of
    the strategy may not raise there."""

    @property
    def num_shown(self) -> int:
        """Return how many facts readers get, which is the index of the next one for them."""
        return self.num_facts - self.num_hidden


# ---- Archived runs ----
#
# A coordinator may keep a hundred thousand of them. They are an immutable mapping by run, with an
# index for each question that would have to look at all of them: which of them need a blob, who
# brought it, what others have begun from, which is the oldest. Another run costs the same however
# many there are.


@dataclass(frozen=True, slots=True)
class EndedRun:
    """The summary kept in memory of a run that has ended and that no worker holds, until it is
    resumed or deleted. Its view and its facts are read from storage."""

    run_id: RunId
    ended: RunPhase
    num_facts: int
    submitted_wall_s: float
    submitted_by: str
    blobs: tuple[Digest, ...]
    """Blobs that must be kept."""
    ended_s: float
    """Leader-clock time of its newest fact."""
    initial: Digest | None
    """The state that its job names to begin from."""
    states: tuple[Digest, ...] = ()
    """Of its blobs, those that it has committed, and its predictions: who may read runs may read
    these."""
    owner: str = ""
    submission: str = ""
    """See RunSubmitted."""
    num_hidden: int = 0
    """Of its facts, those that no reader gets."""
    draws_in_secret: bool = False

    @property
    def num_shown(self) -> int:
        """Return how many facts readers get."""
        return self.num_facts - self.num_hidden

    @property
    def is_released(self) -> bool:
        return True


_AT_ONCE: Final = 64
"""Runs that are added together from which on everything is made anew, in sorted order."""

_NOBODY: Final[Mapping[RunId, EndedRun]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class EndedRuns(Mapping[RunId, EndedRun]):
    """Archived runs by id. Equal are those with equal runs."""

    _runs: PersistentMap[RunId, EndedRun] = field(default_factory=PersistentMap)
    _holders: PersistentMap[Digest, PersistentMap[RunId, EndedRun]] = field(
        default_factory=PersistentMap
    )
    """By blob: the runs that need it."""
    _brought: PersistentMap[str, int] = field(default_factory=PersistentMap)
    """By owner and blob: the number of runs of that owner that need it."""
    _shared: PersistentMap[Digest, int] = field(default_factory=PersistentMap)
    """By state: the number of runs that have committed it."""
    _begun_from: PersistentMap[Digest, int] = field(default_factory=PersistentMap)
    """By state: the number of runs that have begun from it."""
    _phases: PersistentMap[str, int] = field(default_factory=PersistentMap)
    by_end: PersistentOrder[tuple[float, RunId]] = field(default_factory=PersistentOrder)
    """The time at which each has ended, by the leader's clock."""
    by_submission: PersistentOrder[tuple[float, RunId]] = field(default_factory=PersistentOrder)
    """The wall time at which each was submitted, negated: the newest comes first."""

    @classmethod
    def of(cls, runs: Iterable[EndedRun]) -> "EndedRuns":
        """Return these runs, each of another id."""
        found = {run.run_id: run for run in runs}
        holders: defaultdict[Digest, dict[RunId, EndedRun]] = defaultdict(dict)
        brought, shared, begun_from, phases = (Counter[Any]() for _ in range(4))
        for run in found.values():
            for digest in run.blobs:
                holders[digest][run.run_id] = run
            brought.update(_brought_by(run))
            shared.update(run.states)
            begun_from.update(_beginning_of(run))
            phases[run.ended] += 1
        return cls(
            PersistentMap(found),
            PersistentMap({digest: PersistentMap(runs) for digest, runs in holders.items()}),
            PersistentMap(brought),
            PersistentMap(shared),
            PersistentMap(begun_from),
            PersistentMap(phases),
            PersistentOrder((run.ended_s, run.run_id) for run in found.values()),
            PersistentOrder((-run.submitted_wall_s, run.run_id) for run in found.values()),
        )

    def with_runs(self, runs: Collection[EndedRun]) -> "EndedRuns":
        """Return these runs, and others, which take the places of those of the same ids."""
        if len(runs) > max(_AT_ONCE, len(self) // _AT_ONCE):
            return self.of([*self.values(), *runs])
        made = self
        for run in runs:
            made = made.without(run.run_id)._with(run)
        return made

    def without(self, run_id: RunId) -> "EndedRuns":
        """Return the runs without one; these where it is not among them."""
        run = self._runs.get(run_id)
        return self if run is None else self._without(run)

    @property
    def blobs(self) -> Collection[Digest]:
        """Return the blobs that runs need."""
        return self._holders.keys()

    def needing(self, digest: Digest) -> Mapping[RunId, EndedRun]:
        """Return the runs that need a blob."""
        return self._holders.get(digest, _NOBODY)

    def has_brought(self, owner: str, digest: Digest) -> bool:
        """Return True when a run of this owner needs the blob."""
        return _owned(owner, digest) in self._brought

    def has_committed(self, digest: Digest) -> bool:
        """Return True when the blob is a state, or predictions, of a run."""
        return digest in self._shared

    def is_begun_from(self, digest: Digest) -> bool:
        """Return True when a run has begun from this state."""
        return digest in self._begun_from

    @property
    def phases(self) -> Mapping[str, int]:
        """Return the number of runs by how they have ended."""
        return self._phases

    def _with(self, run: EndedRun) -> "EndedRuns":
        holders = self._holders
        for digest in run.blobs:
            needing = holders.get(digest, PersistentMap[RunId, EndedRun]())
            holders = holders.with_item(digest, needing.with_item(run.run_id, run))
        return EndedRuns(
            self._runs.with_item(run.run_id, run),
            holders,
            _changed(self._brought, _brought_by(run), 1),
            _changed(self._shared, run.states, 1),
            _changed(self._begun_from, _beginning_of(run), 1),
            _changed(self._phases, (run.ended,), 1),
            self.by_end.with_item((run.ended_s, run.run_id)),
            self.by_submission.with_item((-run.submitted_wall_s, run.run_id)),
        )

    def _without(self, run: EndedRun) -> "EndedRuns":
        holders = self._holders
        for digest in run.blobs:
            needing = holders[digest].without(run.run_id)
            holders = holders.with_item(digest, needing) if needing else holders.without(digest)
        return EndedRuns(
            self._runs.without(run.run_id),
            holders,
            _changed(self._brought, _brought_by(run), -1),
            _changed(self._shared, run.states, -1),
            _changed(self._begun_from, _beginning_of(run), -1),
            _changed(self._phases, (run.ended,), -1),
            self.by_end.without((run.ended_s, run.run_id)),
            self.by_submission.without((-run.submitted_wall_s, run.run_id)),
        )

    def __getitem__(self, run_id: RunId) -> EndedRun:
        return self._runs[run_id]

    def __iter__(self) -> Iterator[RunId]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)


def _brought_by(run: EndedRun) -> list[str]:
    return [_owned(run.owner, digest) for digest in run.blobs]


def _beginning_of(run: EndedRun) -> tuple[Digest, ...]:
    return () if run.initial is None else (run.initial,)


def _owned(owner: str, digest: Digest) -> str:
    return f"{digest} {owner}"


def _changed(
    counts: PersistentMap[K, int], keys: Iterable[K], change: int
) -> PersistentMap[K, int]:
    for key in keys:
        num = counts.get(key, 0) + change
        counts = counts.with_item(key, num) if num else counts.without(key)
    return counts


# ---- The whole state ----


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    strategies: "Strategies"
    """The strategies that runs can have; given with the first state, changed by no fact."""
    workers: PersistentMap[WorkerId, WorkerRecord] = field(default_factory=PersistentMap)
    runs: Mapping[RunId, RunRecord] = field(default_factory=dict)
    """Active runs, and ended runs that are not archived yet."""
    ended: EndedRuns = field(default_factory=EndedRuns)
    """Archived runs; no run is in both mappings."""
    uploads: PersistentMap[str, tuple[Digest, ...]] = field(default_factory=PersistentMap)
    """By owner: the newest blobs uploaded. Blobs that a run names belong to its owner, too."""

    pinned: frozenset[RunId] = frozenset()
    """Runs that are neither deleted nor expire."""

    holds: Mapping[Digest, float] = field(default_factory=dict)
    """Blobs that list others which are kept until a time of the leader's clock."""

    def all_runs(self) -> list[RunRecord | EndedRun]:
        return [*self.runs.values(), *self.ended.values()]

    def find(self, run_id: RunId) -> RunRecord | EndedRun | None:
        """Return a run, active or not; None when it is not known."""
        return self.runs.get(run_id) or self.ended.get(run_id)

    def is_active(self, run_id: RunId) -> bool:
        """Return True for a run that is known and has not ended."""
        run = self.runs.get(run_id)
        return run is not None and run.ended is None


@dataclass(frozen=True)
class World:
    """The state outside its own run that a strategy may read when it decides."""

    workers: Mapping[WorkerId, WorkerRecord]
    load: Mapping[WorkerId, int]
    """Active runs that have the worker as a member."""
    found: dict[Hashable, tuple[WorkerRecord, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """What placement has looked for among the usable workers, by what it was looked for with: asked
    with every fact, of thousands of workers."""
    numerics: int = 0
    """Version of the numerics rules that the run follows; 0 where it is nobody's."""
    _under: dict[int, "World"] = field(default_factory=dict, repr=False, compare=False)
    _sorted: list[tuple[WorkerRecord, ...]] = field(default_factory=list, repr=False, compare=False)
    """The usable workers once somebody has asked. Worlds made by `under` share the list and know
    nothing of the one they were made of: a circle of thousands of workers, made with each change,
    would wait for the garbage collector."""

    def under(self, numerics: int) -> "World":
        """Return the world as a run sees it that follows this version of the numerics rules."""
        if numerics not in self._under:
            self._under[numerics] = replace(self, numerics=numerics, found={}, _under={})
        return self._under[numerics]

    def usable(self) -> list[WorkerRecord]:
        """Return the workers that are alive, not draining and know the run's rules, the least
        loaded first, then by name."""
        return list(self._current)

    def outdated(self) -> list[WorkerRecord]:
        """Return the workers that could be used if they knew the run's rules."""
        return [record for record in self._usable if not self._is_current(record)]

    def _is_current(self, record: WorkerRecord) -> bool:
        return rules.knows(record.capability.numerics_rules, self.numerics)

    @cached_property
    def _current(self) -> tuple[WorkerRecord, ...]:
        return tuple(record for record in self._usable if self._is_current(record))

    @property
    def _usable(self) -> tuple[WorkerRecord, ...]:
        """The workers that are alive and not draining, sorted once for all runs that ask."""
        if not self._sorted:
            usable = [record for record in self.workers.values() if record.is_usable]
            usable.sort(key=lambda w: (self.load.get(w.member.worker_id, 0), w.member.worker_id))
            self._sorted.append(tuple(usable))
        return self._sorted[0]

    def holds(self, member: Member) -> bool:
        """Return True while exactly this start of the worker is alive and not draining."""
        record = self.workers.get(member.worker_id)
        return record is not None and record.member == member and record.is_usable


def retained(record: RunRecord, num_newest: int | None = None) -> tuple[CommittedState, ...]:
    """Return the commits that are kept: the newest ones (`retention` unless given), the best one,
    and so the final one."""
    newest = record.commits[-(num_newest or record.job.retention) :]
    best = best_commit(record)
    return newest if best is None or best in newest else (best, *newest)


def best_commit(record: RunRecord) -> CommittedState | None:
    """Return the commit with the best value of evaluation.best; the earliest of equals."""
    evaluation = record.job.evaluation
    if evaluation is None or evaluation.best is None:
        return None
    key = f"{evaluation.split}.{evaluation.best}"
    scored = [c for c in record.commits if key in c.metrics and c.metrics[key] == c.metrics[key]]
    if not scored:
        return None
    sign = 1.0 if evaluation.mode == "max" else -1.0
    return max(scored, key=lambda c: (sign * c.metrics[key], -c.segment))


def initial_of(run: RunRecord) -> Digest | None:
    """Return the state that the run's job names to begin from."""
    return None if run.job.initial is None else run.job.initial.digest
