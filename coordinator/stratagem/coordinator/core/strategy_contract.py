"""What the coordinator asks of a strategy.

A strategy speaks for one party of a run: the root, or one that the strategy around it has made. Its
run value carries the path of its party, and so does every fact and effect of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from stratagem.common.base.errors import Violation
from stratagem.common.base.ids import Digest, Party, RunId, WorkerId
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.effects import Base, Effect
from stratagem.coordinator.core.facts import Fact, Member, ProcessDied, Setting
from stratagem.coordinator.core.state import RunPhase, World

if TYPE_CHECKING:  # which is made of what stands here
    from stratagem.coordinator.core.strategy_table import Strategies


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a commit of a population comes from."""

    member: int
    schedule: tuple[Setting, ...]
    """What its state was trained with, in order of step; the last one is that of its score."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """How a run stands, for people."""

    phase: RunPhase
    strategy_phase: str
    reason: str
    step: int = 0
    num_steps: int = 0
    segment: int = 0
    num_segments: int = 0
    num_clients_done: int = 0
    num_clients: int = 0
    members: tuple[Member, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[int, Origin] = field(default_factory=dict)
    """Of a population's kept commits, by segment."""


@dataclass(frozen=True, slots=True)
class PartyView:
    """Who exchanges tensors with whom, in order of rank."""

    membership: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class RejectedClient:
    """A client of a federation whose updates did not count in some rounds."""

    client: int
    worker_id: WorkerId
    """Where it lives, or trains unless that one is lost."""
    num_rounds: int
    reason: str
    """Of the newest rejection."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a party has come, for the strategy around it."""

    committed: Base | None
    metrics: Mapping[str, float]
    """Of the committed segment."""
    num_rows: Mapping[str, int]
    """Rows of each split that the party trains on; empty until the model is built."""
    loss: float
    """Mean training loss of the newest segment, committed or not; 0 where it is not known."""
    is_idle: bool
    """Nothing that was trained waits for its commit or its evaluation."""
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes that were sent in the newest segment, as in SegmentFinished."""
    keeps_more: bool = False
    """The party needs more of its past than the committed state, and an earlier one lacks it."""
    rejected: tuple[RejectedClient, ...] = ()
    """In closed rounds, since the party was begun or rebased."""


class Strategy(Protocol):
    """Pure functions over a frozen run value of the strategy's own choosing."""

    def check(self, job: JobSpec, strategies: "Strategies") -> list[Violation]:
        """What is wrong with this job under this strategy; asked once, at submit."""
        ...

    def init(self, job: JobSpec, party: Party, strategies: "Strategies") -> Any:
        """The run value before anything has happened; strategies: for parties inside this one."""
        ...

    def decide(self, job: JobSpec, value: Any, world: World, now_s: float) -> Fact | None:
        """The next fact that follows from how things stand, if any.

        Asked again after each fact until it answers None; so one decision at a time.
        """
        ...

    def transition(self, job: JobSpec, value: Any, fact: Fact, now_s: float) -> Any:
        """Fold one journaled fact into the run value; now_s is the time of the journal."""
        ...

    def is_welcome(self, job: JobSpec, value: Any, fact: Fact) -> str:
        """Why a fact that an effect reports is stale or unexpected; "" when it is welcome."""
        ...

    def pending(
        self, run_id: RunId, job: JobSpec, value: Any, horizon: int | None = None
    ) -> frozenset[Effect]:
        """All that the party now needs done; no segment beyond the horizon is begun."""
        ...

    def next_deadline(self, value: Any) -> float | None:
        """Leader-clock time at which decide should be asked again even if nothing happens."""
        ...

    def outlook(self, job: JobSpec, value: Any, world: World) -> Outlook:
        """How the run stands."""
        ...

    def parties(self, value: Any) -> Mapping[Party, PartyView]:
        """The parties, from this one down, whose members exchange tensors among themselves."""
        ...

    def deaths(self, value: Any, member: Member) -> tuple[ProcessDied, ...]:
        """A worker process has ended unasked: what it was working on here."""
        ...

    def reform(self, value: Any, party: Party, reason: str) -> Fact | None:
        """The exchange of a party has failed although all its members live: a new membership."""
        ...

    def job_of(self, job: JobSpec, value: Any, party: Party) -> JobSpec:
        """What a party, this one or one below, trains."""
        ...

    def blobs(self, value: Any) -> frozenset[Digest]:
        """The states that may still be needed, beside those of the run's commits."""
        ...


@runtime_checkable
class Nestable(Strategy, Protocol):
    """A strategy that can also run inside another one, segment by segment."""

    def standing(self, value: Any) -> Standing:
        """How far the party has come."""
        ...

    def rebase(self, job: JobSpec, value: Any, base: Base, num_rows: Mapping[str, int]) -> Any:
        """Go on from a state that was given, as if it had just been committed here.

        num_rows: as in Standing, for a party that has not built the model itself.
        """
        ...


@runtime_checkable
class Returning(Nestable, Protocol):
    """A nestable strategy that knows more of a commit of its own than of a state that is given."""

    def returned(self, job: JobSpec, value: Any, base: Base, metrics: Mapping[str, float]) -> Any:
        """Go back to an earlier commit of the party's own, with its metrics.

        What was still owed to it, and to those before, is still owed.
        """
        ...
