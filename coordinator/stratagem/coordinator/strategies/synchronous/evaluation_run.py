"""A run that trains nothing: a given state is evaluated once, by all members together.

The state is built on one worker, or taken from the store, and is commit 0. Each batch belongs to
one of the logical shards, and each shard to a member; what a member answers is sums of single
batches, so the metrics do not depend on who evaluated what. A lost member's shards go to the
others, which keep what they have evaluated already.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from stratagem.common.base.errors import Violation
from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.common.job import EvaluationSpec, JobSpec
from stratagem.common.strategy import DataParallel
from stratagem.coordinator.core.crash_loops import why
from stratagem.coordinator.core.effects import Build, Effect, EvaluateTogether
from stratagem.coordinator.core.facts import (
    Evaluated,
    Fact,
    Member,
    ProcessDied,
    RunCompleted,
    RunFailed,
)
from stratagem.coordinator.core.state import RunPhase, World
from stratagem.coordinator.core.strategy_contract import Outlook, PartyView
from stratagem.coordinator.core.strategy_table import Strategies
from stratagem.coordinator.strategies.scheduling.placement import why_none
from stratagem.coordinator.strategies.synchronous.segments import (
    PartyRun,
    Shape,
    party_decisions,
    party_views,
    synchronous_run,
)

# The open segment of the party: 0 while there is no state, then one of these.
_EVALUATING = 1
_DONE = 2


def check(job: JobSpec, strategies: Strategies) -> list[Violation]:
    """Every valid job of this kind can be carried out."""
    del job, strategies
    return []


def init(job: JobSpec, party: Party, strategies: Strategies) -> PartyRun:
    del job, strategies
    return PartyRun(party)


def decide(job: JobSpec, value: PartyRun, world: World, now_s: float) -> Fact | None:
    """A death too many, the end, or other members."""
    del now_s
    if value.deaths.are_too_many:
        return RunFailed(reason=why("the evaluation", value.deaths))
    if value.open_segment == _DONE:
        split = _spec(job).split
        return RunCompleted(reason=f"{value.num_rows[split]} rows of {split} evaluated")
    return party_decisions.members_due(job, value, _shape(job), world)


def transition(job: JobSpec, value: PartyRun, fact: Fact, now_s: float) -> PartyRun:
    if isinstance(fact, Evaluated):
        return replace(value, metrics=fact.metrics, open_segment=_DONE, is_recovering=False)
    return synchronous_run.transition(value, fact, _shape(job), now_s)


def is_welcome(job: JobSpec, value: PartyRun, fact: Fact) -> str:
    del job
    if isinstance(fact, Evaluated):
        return "" if value.open_segment == _EVALUATING else "no evaluation is under way"
    return synchronous_run.is_welcome(value, fact)


def pending(
    run_id: RunId, job: JobSpec, value: PartyRun, horizon: int | None = None
) -> frozenset[Effect]:
    """The state, then its evaluation."""
    del horizon
    if not value.members or value.open_segment == _DONE:
        return frozenset()
    if value.committed is None:
        return frozenset({Build(run_id, value.party, value.membership, value.members[0])})
    effect = EvaluateTogether(
        run_id=run_id,
        party=value.party,
        membership=value.membership,
        base=value.committed,
        splits=(_spec(job).split,),
        members=value.members,
        num_shards=_shape(job).num_shards,
    )
    return frozenset({effect})


def next_deadline(value: PartyRun) -> float | None:
    del value
    return None


def outlook(job: JobSpec, value: PartyRun, world: World) -> Outlook:
    """How the run stands; steps are batches."""
    spec = _spec(job)
    num_batches = ceil(value.num_rows.get(spec.split, 0) / spec.batch_size)
    phase, strategy_phase, reason = _phase(job, value, world)
    return Outlook(
        phase=phase,
        strategy_phase=strategy_phase,
        reason=reason,
        step=num_batches if value.open_segment == _DONE else 0,
        num_steps=num_batches,
        members=value.members,
    )


def parties(value: PartyRun) -> Mapping[Party, PartyView]:
    return party_views.parties(value)


def deaths(value: PartyRun, member: Member) -> tuple[ProcessDied, ...]:
    return party_views.deaths(value, member)


def reform(value: PartyRun, party: Party, reason: str) -> Fact | None:
    """Nothing is exchanged that could fail."""
    del value, party, reason
    return None


def job_of(job: JobSpec, value: PartyRun, party: Party) -> JobSpec:
    return party_views.job_of(job, value, party)


def blobs(value: PartyRun) -> frozenset[Digest]:
    return party_views.blobs(value)


def _spec(job: JobSpec) -> EvaluationSpec:
    assert job.evaluation is not None  # the job was checked
    return job.evaluation


def _shape(job: JobSpec) -> Shape:
    strategy = job.strategy
    if isinstance(strategy, DataParallel):
        return Shape(strategy.num_replicas, strategy.options.min_replicas)
    return Shape(num_shards=1, min_members=1)


def _phase(job: JobSpec, value: PartyRun, world: World) -> tuple[RunPhase, str, str]:
    shape = _shape(job)
    if not value.members:
        need = f"waiting for {shape.min_members} of {shape.num_shards} workers"
        reason = f"{need}: {why_none(job, world, value.fingerprint)}"
        phase = RunPhase.RECOVERING if value.is_recovering else RunPhase.PLACING
        return phase, "WAITING", reason
    if value.open_segment == 0:
        return RunPhase.RUNNING, "BUILDING", value.why
    phase = RunPhase.RECOVERING if value.is_recovering else RunPhase.RUNNING
    return phase, "EVALUATING", value.why
