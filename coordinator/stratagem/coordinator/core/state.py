"""What the coordinator knows: frozen values made by folding facts, and nothing derived."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stratagem.common.base.ids import Digest, RunId, WorkerId
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.facts import Capability, ErrorRecord, Member

if TYPE_CHECKING:  # both are made of what stands here
    from stratagem.coordinator.core.strategy_contract import Strategy
    from stratagem.coordinator.core.strategy_table import Strategies


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
    """Lost before it had begun what it was given."""
    lost_s: float = 0.0
    """Leader-clock time of its loss, of one that is not alive."""

    @property
    def is_usable(self) -> bool:
        return self.is_alive and not self.is_draining


@dataclass(frozen=True, slots=True)
class CommittedState:
    segment: int
    step: int
    digest: Digest
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunRecord:
    run_id: RunId
    job: JobSpec
    strategy: "Strategy"
    """That runs the job, out of the table of this process."""
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
    """For people; empty: it is not known."""
    submission: str = ""
    """See RunSubmitted."""
    owner: str = ""
    """Who may stop, resume and delete it without the scope admin."""
    traceparent: str = ""
    """See RunSubmitted."""
    numerics: int = 1
    """See RunSubmitted."""
    changed_s: float = 0.0
    """Leader-clock time of the newest fact."""
    num_facts: int = 0
    """Facts journaled so far, which is the index of the next one."""
    is_released: bool = True
    """False while workers may hold sessions of the run."""
    is_reproducible: bool = True
    num_returns: int = 0
    """How often it has gone on from an earlier commit: what has happened may happen again."""
    touched: frozenset[Member] = frozenset()
    """Members that were ever given a session and have not been released."""
    has_raised: bool = False
    """Its strategy has raised when a fact was folded, which stands in no fact: another version of
    the strategy may not raise there."""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """What stays in memory of a run that has ended and that no worker holds, until it is resumed or
    deleted. The rest can be read: how it is shown, and its facts."""

    run_id: RunId
    ended: RunPhase
    num_facts: int
    submitted_wall_s: float
    submitted_by: str
    blobs: tuple[Digest, ...]
    """That must stay."""
    ended_s: float
    """Leader-clock time of its newest fact."""
    initial: Digest | None
    """The state that its job has named to begin from."""
    owner: str = ""
    submission: str = ""
    """See RunSubmitted."""

    @property
    def is_released(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    strategies: "Strategies"
    """That runs can have; given with the first state, and not changed by any fact."""
    workers: Mapping[WorkerId, WorkerRecord] = field(default_factory=dict)
    runs: Mapping[RunId, RunRecord] = field(default_factory=dict)
    """The active ones, and of the ended ones those that are not at rest."""
    ended: Mapping[RunId, EndedRun] = field(default_factory=dict)
    """Those at rest; no run is in both."""
    uploads: Mapping[str, tuple[Digest, ...]] = field(default_factory=dict)
    """By owner: the newest blobs that they have brought. What a run names is its owner's, too."""

    def all_runs(self) -> list[RunRecord | EndedRun]:
        return [*self.runs.values(), *self.ended.values()]

    def find(self, run_id: RunId) -> RunRecord | EndedRun | None:
        """A run, active or not."""
        return self.runs.get(run_id) or self.ended.get(run_id)


@dataclass(frozen=True)
class World:
    """What a strategy may look at beside its own run when it decides."""

    workers: Mapping[WorkerId, WorkerRecord]
    load: Mapping[WorkerId, int]
    """Active runs that have the worker as a member."""

    def usable(self) -> list[WorkerRecord]:
        """Alive, not draining; the least loaded first, then by name."""
        return list(self._usable)

    @cached_property
    def _usable(self) -> tuple[WorkerRecord, ...]:
        """Sorted once, for all runs that ask."""
        found = [record for record in self.workers.values() if record.is_usable]
        found.sort(key=lambda w: (self.load.get(w.member.worker_id, 0), w.member.worker_id))
        return tuple(found)

    def holds(self, member: Member) -> bool:
        """True while exactly this start of the worker is alive and not draining."""
        record = self.workers.get(member.worker_id)
        return record is not None and record.member == member and record.is_usable


def retained(record: RunRecord) -> tuple[CommittedState, ...]:
    """The commits that are kept: the newest ones, the best one, and so the final one."""
    newest = record.commits[-record.job.retention :]
    best = best_commit(record)
    return newest if best is None or best in newest else (best, *newest)


def best_commit(record: RunRecord) -> CommittedState | None:
    """The commit with the best value of evaluation.best; the earliest of equals."""
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
    """The state that the run's job has named to begin from."""
    return None if run.job.initial is None else run.job.initial.digest
