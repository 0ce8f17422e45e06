"""The strategy of a run that trains nothing: a given state is evaluated once, by all members
together.

The state is built on one worker, or taken from the store, and is commit 0. Each batch belongs to
one of the logical shards, and each shard to a member; members answer with sums of single batches,
so the metrics do not depend on the division of the work. A lost member's shards go to the others,
which keep what they have evaluated already.
"""

from dataclasses import replace
from math import ceil

from stratagem.common.base.ids import RunId
from stratagem.common.job import EvaluationSpec, JobSpec
from stratagem.common.strategy import DataParallel
from stratagem.coordinator.core.courses import why
from stratagem.coordinator.core.effects import Build, Effect, EvaluateState
from stratagem.coordinator.core.facts import Evaluated, Fact, RunCompleted, RunFailed
from stratagem.coordinator.core.strategy_contract import VERSION, Status, Strategy
from stratagem.coordinator.core.world import World
from stratagem.coordinator.strategies.synchronous import decisions
from stratagem.coordinator.strategies.synchronous import party as synchronous_run
from stratagem.coordinator.strategies.synchronous.party import PartyRun, SegmentRules

# The open segment of the party: 0 while there is no state, then one of these.
_EVALUATING = 1
_DONE = 2


def _decide(job: JobSpec, value: PartyRun, world: World, _now_s: float) -> Fact | None:
    """Return the next fact: the run fails because too many workers died, is complete, or its
    members change; None if nothing changes."""
    if value.deaths.are_too_many:
        return RunFailed(reason=why("the evaluation", value.deaths))
    if value.open_segment == _DONE:
        split = _spec(job).split
        return RunCompleted(reason=f"{value.num_rows[split]} rows of {split} evaluated")
    return decisions.members_due(job, value, _shape(job), world)


def _transition(job: JobSpec, value: PartyRun, fact: Fact, now_s: float) -> PartyRun:
    if isinstance(fact, Evaluated):
        return replace(value, metrics=fact.metrics, open_segment=_DONE, is_recovering=False)
    return synchronous_run.transition(job, value, fact, _shape(job), now_s)


def _reject_reason(_job: JobSpec, value: PartyRun, fact: Fact) -> str:
    if isinstance(fact, Evaluated):
        return "" if value.open_segment == _EVALUATING else "no evaluation is under way"
    return synchronous_run.reject_reason(value, fact)


def _pending(
    run_id: RunId, job: JobSpec, value: PartyRun, _horizon: int | None
) -> frozenset[Effect]:
    """Return the effects due: the build of the state, then its evaluation."""
    if not value.members or value.open_segment == _DONE:
        return frozenset()
    if value.committed is None:
        return frozenset({Build(run_id, value.party, value.membership, value.members[0])})
    effect = EvaluateState(
        run_id=run_id,
        party=value.party,
        membership=value.membership,
        base=value.committed,
        splits=(_spec(job).split,),
        members=value.members,
        num_shards=_shape(job).num_shards,
    )
    return frozenset({effect})


def _status(job: JobSpec, value: PartyRun, world: World) -> Status:
    """Return the run's status, for people; steps are batches."""
    spec = _spec(job)
    num_batches = ceil(value.num_rows.get(spec.split, 0) / spec.batch_size)
    phase, strategy_phase, reason = decisions.phase_of(job, value, _shape(job), world)
    return Status(
        phase=phase,
        strategy_phase="EVALUATING" if strategy_phase == "TRAINING" else strategy_phase,
        reason=reason,
        step=num_batches if value.open_segment == _DONE else 0,
        num_steps=num_batches,
        members=value.members,
    )


def _spec(job: JobSpec) -> EvaluationSpec:
    assert job.evaluation is not None  # the job was checked
    return job.evaluation


def _shape(job: JobSpec) -> SegmentRules:
    strategy = job.strategy
    if isinstance(strategy, DataParallel):
        return SegmentRules(strategy.num_replicas, strategy.options.min_replicas)
    return SegmentRules(num_shards=1, min_members=1)


STRATEGY = Strategy(
    version=VERSION,
    init=lambda _job, party, _strategies: PartyRun(party),
    decide=_decide,
    transition=_transition,
    reject_reason=_reject_reason,
    pending=_pending,
    status=_status,
    own_parties=decisions.parties,
    own_deaths=decisions.deaths,
    own_blobs=decisions.blobs,
)
