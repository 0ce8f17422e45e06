"""The coordinator's state: frozen values made by folding facts, and nothing derived."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from stratagem.common.base.ids import NO_DIGEST, Digest, Party, RunId, WorkerId
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.facts import ErrorRecord, Member, VerificationEnded
from stratagem.coordinator.core.persistent import PersistentMap, PersistentOrder
from stratagem.coordinator.core.strategy_contract import Strategies, Strategy
from stratagem.coordinator.core.world import RunPhase, WorkerRecord

K = TypeVar("K", bound=str)


@dataclass(frozen=True, slots=True)
class CommittedState:
    segment: int
    step: int
    digest: Digest
    metrics: Mapping[str, float] = field(default_factory=dict)
    streams: str = ""
    """The position in each stream of rows at the commit; see effects.Base."""
    average: Digest = NO_DIGEST
    """The blob with the averaged parameters, if the run keeps averages; see effects.Base."""
    is_partial: bool = False
    """True if the parts that only one worker has are not in the blob; see SegmentCommitted."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    run_id: RunId
    job: JobSpec
    strategy: Strategy
    """The strategy that runs the job, from the strategies of this process."""
    value: Any
    """The run value, which only the strategy reads."""
    ended: RunPhase | None = None
    """COMPLETED, FAILED or CANCELLED once the run has ended."""
    reason: str = ""
    error: ErrorRecord | None = None
    commits: tuple[CommittedState, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    predictions: Digest | None = None
    """The blob with the model's outputs, if they were requested."""
    engine: str = ""
    submitted_wall_s: float = 0.0
    submitted_by: str = ""
    """The caller, for people; empty if not known."""
    submission: str = ""
    """Tells the run's stored files from those of a deleted run of the same id; see RunSubmitted."""
    owner: str = ""
    """The owner, who may stop, resume and delete the run without the admin scope."""
    traceparent: str = ""
    """Position of the run in a trace, if it is traced; see RunSubmitted."""
    numerics: int = 1
    """Version of the rules that fix the run's result bit for bit; see RunSubmitted."""
    changed_s: float = 0.0
    """Leader-clock time of the newest fact."""
    num_facts: int = 0
    """The number of facts journaled so far, and so the index of the next one."""
    num_hidden: int = 0
    """The number of facts that readers do not get; see core/strategy_calls.py."""
    is_released: bool = True
    """False while workers may hold sessions of the run."""
    is_reproducible: bool = True
    num_returns: int = 0
    """The run's returns to earlier commits so far, after which the same facts may recur."""
    touched: frozenset[Member] = frozenset()
    """Members that were given a session and have not been released. Those that have left, or whose
    worker has a newer process, are dropped while the run is active."""
    rows: Mapping[Party, str] = field(default_factory=dict)
    """A sample of each party's rows, as they were when its model was built."""
    has_raised: bool = False
    """True if the strategy has raised when a fact was folded. No fact says so, and another version
    of the strategy may not raise for the same fact."""

    @property
    def num_shown(self) -> int:
        """Return the number of facts that readers get: the index of the next one for them."""
        return self.num_facts - self.num_hidden


# ---- Archived runs ----
#
# A coordinator may keep a hundred thousand of them. They are an immutable mapping by run, with an
# index for each question that would have to look at all of them: which of them need a blob, who
# brought it, what others have begun from, which is the oldest. Another run costs the same however
# many there are.


@dataclass(frozen=True, slots=True)
class EndedRun:
    """The summary in memory of an archived run, which has ended and which no worker holds. Its view
    and its facts are read from storage."""

    run_id: RunId
    ended: RunPhase
    num_facts: int
    submitted_wall_s: float
    submitted_by: str
    blobs: tuple[Digest, ...]
    """The blobs that must be kept for the run."""
    ended_s: float
    """Leader-clock time of the run's newest fact."""
    initial: Digest | None
    """The state from which the job begins; None if it names none."""
    states: tuple[Digest, ...] = ()
    """The blobs that are committed states or predictions: every caller who may read runs may read
    them."""
    owner: str = ""
    submission: str = ""
    """Tells the run's stored files from those of a deleted run of the same id; see RunSubmitted."""
    num_hidden: int = 0
    """The number of facts that readers do not get."""
    draws_in_secret: bool = False

    @property
    def num_shown(self) -> int:
        """Return the number of the run's facts that readers get."""
        return self.num_facts - self.num_hidden

    @property
    def is_released(self) -> bool:
        return True


_AT_ONCE: Final = 64
"""More runs than this, added together, rebuild the collection instead of changing it run by run."""

_NOBODY: Final[Mapping[RunId, EndedRun]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class EndedRuns(Mapping[RunId, EndedRun]):
    """Archived runs by id, with indexes; two instances with equal runs are equal."""

    _runs: PersistentMap[RunId, EndedRun] = field(default_factory=PersistentMap)
    _holders: PersistentMap[Digest, PersistentMap[RunId, EndedRun]] = field(
        default_factory=PersistentMap
    )
    """The runs that need a blob, keyed by blob."""
    _brought: PersistentMap[str, int] = field(default_factory=PersistentMap)
    """The number of runs of an owner that need a blob, keyed by owner and blob."""
    _shared: PersistentMap[Digest, int] = field(default_factory=PersistentMap)
    """The number of runs that have committed a state, keyed by state."""
    _begun_from: PersistentMap[Digest, int] = field(default_factory=PersistentMap)
    """The number of runs that have begun from a state, keyed by state."""
    _phases: PersistentMap[str, int] = field(default_factory=PersistentMap)
    by_end: PersistentOrder[tuple[float, RunId]] = field(default_factory=PersistentOrder)
    """The runs with the leader-clock time at which each has ended, sorted by that time."""
    by_submission: PersistentOrder[tuple[float, RunId]] = field(default_factory=PersistentOrder)
    """The runs with the negated wall time of their submission: the newest comes first."""

    @classmethod
    def of(cls, runs: Iterable[EndedRun]) -> "EndedRuns":
        """Return a collection of these runs, whose ids must differ."""
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
        """Return a copy with these runs added, in place of runs with the same ids."""
        if len(runs) > max(_AT_ONCE, len(self) // _AT_ONCE):
            return self.of([*self.values(), *runs])
        made = self
        for run in runs:
            made = made.without(run.run_id)._with(run)
        return made

    def without(self, run_id: RunId) -> "EndedRuns":
        """Return a copy without one run; this very collection if it does not have the run."""
        run = self._runs.get(run_id)
        return self if run is None else self._without(run)

    @property
    def blobs(self) -> Collection[Digest]:
        """Return the blobs that archived runs need."""
        return self._holders.keys()

    def needing(self, digest: Digest) -> Mapping[RunId, EndedRun]:
        """Return the archived runs that need a blob."""
        return self._holders.get(digest, _NOBODY)

    def has_brought(self, owner: str, digest: Digest) -> bool:
        """Return True if an archived run of this owner needs the blob."""
        return _owned(owner, digest) in self._brought

    def has_committed(self, digest: Digest) -> bool:
        """Return True if the blob is a committed state, or the predictions, of an archived run."""
        return digest in self._shared

    def is_begun_from(self, digest: Digest) -> bool:
        """Return True if an archived run has begun from this state."""
        return digest in self._begun_from

    @property
    def phases(self) -> Mapping[str, int]:
        """Return the number of runs per phase in which they have ended."""
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
    strategies: Strategies
    """The strategies that runs can have; given with the first state, and changed by no fact."""
    workers: PersistentMap[WorkerId, WorkerRecord] = field(default_factory=PersistentMap)
    runs: Mapping[RunId, RunRecord] = field(default_factory=dict)
    """Active runs, and ended runs that are not archived yet."""
    ended: EndedRuns = field(default_factory=EndedRuns)
    """Archived runs; no run is in both mappings."""
    uploads: PersistentMap[str, tuple[Digest, ...]] = field(default_factory=PersistentMap)
    """The newest uploads, keyed by owner. Blobs that a run names are its owner's, too."""

    pinned: frozenset[RunId] = frozenset()
    """The pinned runs, which can be neither deleted nor expired."""

    verifications: Mapping[RunId, VerificationEnded] = field(default_factory=dict)
    """The newest verification of each ended run that was verified."""

    holds: Mapping[Digest, float] = field(default_factory=dict)
    """The leader-clock time until which blobs are kept, keyed by the blob that lists them."""

    def all_runs(self) -> list[RunRecord | EndedRun]:
        return [*self.runs.values(), *self.ended.values()]

    def find(self, run_id: RunId) -> RunRecord | EndedRun | None:
        """Return a run, active or archived; None if it is not known."""
        return self.runs.get(run_id) or self.ended.get(run_id)


def retained(record: RunRecord, num_newest: int | None = None) -> tuple[CommittedState, ...]:
    """Return the commits that are kept: the newest ones (`retention` unless num_newest is given),
    and the best one."""
    newest = record.commits[-(num_newest or record.job.retention) :]
    best = best_commit(record)
    return newest if best is None or best in newest else (best, *newest)


def best_commit(record: RunRecord) -> CommittedState | None:
    """Return the best commit by evaluation.best, the earliest of equals; None without a value."""
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
    """Return the state from which the run's job begins; None if it names none."""
    return None if run.job.initial is None else run.job.initial.digest
