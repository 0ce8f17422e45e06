"""What the coordinator asks of a strategy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from stratagem.common.errors import Violation
from stratagem.common.ids import RunId
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.effects import Effect
from stratagem.coordinator.core.facts import Fact, Member
from stratagem.coordinator.core.state import RunPhase, World


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


class Strategy(Protocol):
    """Pure functions over a frozen run value of the strategy's own choosing."""

    def check(self, job: JobSpec) -> list[Violation]:
        """What is wrong with this job under this strategy; asked once, at submit."""
        ...

    def init(self, job: JobSpec) -> Any:
        """The run value before anything has happened."""
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

    def pending(self, run_id: RunId, job: JobSpec, value: Any) -> frozenset[Effect]:
        """All that the run now needs done."""
        ...

    def next_deadline(self, value: Any) -> float | None:
        """Leader-clock time at which decide should be asked again even if nothing happens."""
        ...

    def outlook(self, job: JobSpec, value: Any, world: World) -> Outlook:
        """How the run stands."""
        ...
