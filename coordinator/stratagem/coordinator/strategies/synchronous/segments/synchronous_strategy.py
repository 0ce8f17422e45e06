"""A strategy of one synchronous party, made from what tells it from others: a check and a shape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stratagem.common.base.errors import Violation
from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.effects import Base, Effect
from stratagem.coordinator.core.facts import Fact, Member, ProcessDied
from stratagem.coordinator.core.state import World
from stratagem.coordinator.core.strategy_contract import Outlook, PartyView, Standing
from stratagem.coordinator.core.strategy_table import Strategies
from stratagem.coordinator.strategies.synchronous.segments import (
    due_effects,
    party_decisions,
    party_views,
    synchronous_run,
)
from stratagem.coordinator.strategies.synchronous.segments.synchronous_run import PartyRun, Shape


@dataclass(frozen=True, slots=True)
class Synchronous:
    """`contract.Nestable` of a party that trains segment after segment; nothing depends on time."""

    objections: Callable[[JobSpec], list[Violation]]
    """What is wrong with a job under this strategy."""
    shape: Callable[[JobSpec], Shape]
    """How the job's party is made up and what its members hold."""

    def check(self, job: JobSpec, strategies: Strategies) -> list[Violation]:
        del strategies
        return self.objections(job)

    def init(self, job: JobSpec, party: Party, strategies: Strategies) -> PartyRun:
        del job, strategies
        return PartyRun(party)

    def decide(self, job: JobSpec, value: PartyRun, world: World, now_s: float) -> Fact | None:
        del now_s
        return party_decisions.decide(job, value, self.shape(job), world)

    def transition(self, job: JobSpec, value: PartyRun, fact: Fact, now_s: float) -> PartyRun:
        return synchronous_run.transition(value, fact, self.shape(job), now_s)

    def is_welcome(self, job: JobSpec, value: PartyRun, fact: Fact) -> str:
        del job
        return synchronous_run.is_welcome(value, fact)

    def pending(
        self, run_id: RunId, job: JobSpec, value: PartyRun, horizon: int | None = None
    ) -> frozenset[Effect]:
        return due_effects.pending(run_id, job, value, self.shape(job), horizon)

    def next_deadline(self, value: PartyRun) -> float | None:
        del value
        return None

    def outlook(self, job: JobSpec, value: PartyRun, world: World) -> Outlook:
        return party_views.outlook(job, value, self.shape(job), world)

    def parties(self, value: PartyRun) -> Mapping[Party, PartyView]:
        return party_views.parties(value)

    def deaths(self, value: PartyRun, member: Member) -> tuple[ProcessDied, ...]:
        return party_views.deaths(value, member)

    def reform(self, value: PartyRun, party: Party, reason: str) -> Fact | None:
        return party_decisions.reform(value, party, reason)

    def job_of(self, job: JobSpec, value: PartyRun, party: Party) -> JobSpec:
        return party_views.job_of(job, value, party)

    def blobs(self, value: PartyRun) -> frozenset[Digest]:
        return party_views.blobs(value)

    def standing(self, value: PartyRun) -> Standing:
        return party_views.standing(value)

    def rebase(
        self, job: JobSpec, value: PartyRun, base: Base, num_rows: Mapping[str, int]
    ) -> PartyRun:
        return synchronous_run.rebase(job, value, base, num_rows)

    def returned(
        self, job: JobSpec, value: PartyRun, base: Base, metrics: Mapping[str, float]
    ) -> PartyRun:
        """Its metrics count on, such as the steps that were skipped up to it."""
        return replace(synchronous_run.rebase(job, value, base, value.num_rows), metrics=metrics)
