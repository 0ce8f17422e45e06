"""Stands in for a strategy whose package is no longer installed.

Its runs fail with the reason and can be resumed once the package is back; the coordinator and all
other runs go on.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stratagem.common.base.errors import Violation
from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.common.job import JobSpec
from stratagem.common.strategy import describe
from stratagem.coordinator.core.effects import Effect
from stratagem.coordinator.core.facts import Fact, Member, ProcessDied, RunFailed
from stratagem.coordinator.core.state import RunPhase, World
from stratagem.coordinator.core.strategy_contract import Outlook, PartyView

if TYPE_CHECKING:
    from stratagem.coordinator.core.strategy_table import Strategies


def _reason(job: JobSpec) -> str:
    return f"the strategy {describe(job.strategy)} is not installed on this coordinator"


def check(job: JobSpec, strategies: "Strategies") -> list[Violation]:
    """Nothing can run under it."""
    del strategies
    return [Violation("strategy", _reason(job))]


def init(job: JobSpec, party: Party, strategies: "Strategies") -> None:
    """It has no run value."""
    del job, party, strategies


def decide(job: JobSpec, value: Any, world: World, now_s: float) -> Fact:
    """The run fails with the reason."""
    del value, world, now_s
    return RunFailed(reason=_reason(job))


def transition(job: JobSpec, value: Any, fact: Fact, now_s: float) -> Any:
    """Facts are kept in the journal, for the strategy to fold when it is back."""
    del job, fact, now_s
    return value


def is_welcome(job: JobSpec, value: Any, fact: Fact) -> str:
    """No report is."""
    del value, fact
    return _reason(job)


def pending(
    run_id: RunId, job: JobSpec, value: Any, horizon: int | None = None
) -> frozenset[Effect]:
    """Nothing is due."""
    del run_id, job, value, horizon
    return frozenset()


def next_deadline(value: Any) -> float | None:
    """Nothing depends on time."""
    del value
    return None


def outlook(job: JobSpec, value: Any, world: World) -> Outlook:
    """The reason."""
    del value, world
    return Outlook(RunPhase.PLACING, "WAITING", _reason(job))


def parties(value: Any) -> Mapping[Party, PartyView]:
    """None."""
    del value
    return {}


def deaths(value: Any, member: Member) -> tuple[ProcessDied, ...]:
    """Nobody works for it."""
    del value, member
    return ()


def reform(value: Any, party: Party, reason: str) -> None:
    """There is nobody to form."""
    del value, party, reason


def job_of(job: JobSpec, value: Any, party: Party) -> JobSpec:
    """The run's job."""
    del value, party
    return job


def blobs(value: Any) -> frozenset[Digest]:
    """What it needed is not known."""
    del value
    return frozenset()
