"""What a federated run waits for: the build, the clients of the round, the fold, evaluations.

Pure: `pending` names the effects that a state calls for; the loop starts those that do not run yet,
and a coordinator that was restarted names the same ones again.
"""

from collections.abc import Iterator
from dataclasses import replace

from stratagem.common.base.ids import RunId
from stratagem.common.job import JobSpec
from stratagem.common.strategy import is_judged
from stratagem.coordinator.core.effects import (
    AccountRound,
    AggregateRound,
    Base,
    Build,
    Effect,
    EvaluateState,
    JudgeUpdates,
    MergeMetrics,
    PostKeys,
    RouteShares,
    TrainClient,
)
from stratagem.coordinator.core.metric_course import course_of, why_stopped
from stratagem.coordinator.strategies.evaluation.commit_metrics import commit_metrics
from stratagem.coordinator.strategies.federated import late_updates
from stratagem.coordinator.strategies.federated.client_evaluation import evaluators_left, to_merge
from stratagem.coordinator.strategies.federated.federated_run import (
    FederatedRun,
    due_clients,
    spec_of,
)
from stratagem.coordinator.strategies.federated.round_decisions import (
    candidates_of,
    is_evaluated_first,
)
from stratagem.coordinator.strategies.federated.round_metrics import TRAFFIC
from stratagem.coordinator.strategies.privacy import privacy_ledger
from stratagem.coordinator.strategies.scheduling.fold_tree import places_by_region
from stratagem.coordinator.strategies.secure_aggregation import secure_setup


def pending(
    run_id: RunId, job: JobSpec, value: FederatedRun, horizon: int | None
) -> frozenset[Effect]:
    """Return the build, the clients still to be trained, the fold, the evaluations."""
    effects: set[Effect] = set()
    if value.committed is None:
        if value.helper:
            effects.add(Build(run_id, value.party, value.membership, value.helper[0]))
        return frozenset(effects)
    if value.is_closed:
        effects.add(_fold(run_id, job, value, value.committed))
    elif horizon is None or value.round_num <= horizon:
        effects.update(_training(run_id, job, value))
        effects.update(_accounting(run_id, job, value))
    if horizon is None or value.round_num <= horizon:
        effects.update(late_updates.effects(run_id, job, value))
    for base in value.to_evaluate:
        effects.update(_evaluating(run_id, job, value, base))
    for segment, due in to_merge(job, value):
        if due.member is not None:
            of_round = run_id, value.party, segment, due.member, due.states, due.metrics
            effects.add(MergeMetrics(*of_round))
    return frozenset(effects)


def _training(
    run_id: RunId, job: JobSpec, value: FederatedRun
) -> Iterator[TrainClient | PostKeys | RouteShares]:
    """Yield the training of the clients that are due, after what a secure round exchanges."""
    if spec_of(job).options.secure_aggregation is not None and value.is_opened:
        workers = {client: value.roster[client].worker_id for client in value.unanswered()}
        may_leave_out = spec_of(job).options.quorum is not None
        of_round = run_id, value.party, value.round_num, value.secure, workers
        if due := secure_setup.exchange(*of_round, may_leave_out=may_leave_out):
            yield due
            return
    for client in due_clients(value):
        own = late_updates.of_open_round(value, client)
        yield late_updates.training(run_id, job, value, client, own)


def _accounting(run_id: RunId, job: JobSpec, value: FederatedRun) -> Iterator[AccountRound]:
    """Yield the accounting of the next round of a private run, as long as there is one."""
    if (
        value.ledger is None
        or value.is_opened
        or not value.roster
        or is_evaluated_first(job, value)
    ):
        return
    if value.round_num <= spec_of(job).rounds and not why_stopped(job, value.metrics):
        candidates = candidates_of(job, value)
        due = privacy_ledger.accounting(
            run_id, value.party, value.ledger, value.round_num, candidates
        )
        if due is not None:
            yield due


def _evaluating(
    run_id: RunId, job: JobSpec, value: FederatedRun, base: Base
) -> Iterator[EvaluateState]:
    """Yield the evaluations of a state: by the helper, or by each client of the round on its own
    rows."""
    if job.evaluation is None or not value.helper:
        return
    splits = (job.evaluation.split,)
    if job.evaluation.of == "average" and base.average:
        base = replace(base, digest=base.average)
    if base.segment not in value.evaluators:
        yield EvaluateState(run_id, value.party, 0, base, splits, value.helper[:1])
        return
    here = {member.worker_id: member for member in value.helper}
    states = value.client_states
    for client in evaluators_left(value, base.segment):
        member = here.get(value.roster[client].worker_id)
        if member is not None:
            at_client = EvaluateState(
                run_id, value.party, 0, base, splits, (member,), client=client
            )
            own = None if states is None else states.of_evaluation(base.segment, client)
            yield replace(at_client, client_state=own)


def _fold(
    run_id: RunId, job: JobSpec, value: FederatedRun, base: Base
) -> JudgeUpdates | AggregateRound:
    number, accepted = value.round_num, value.accepted
    options = spec_of(job).options
    if (options.q is not None or is_judged(options.robust)) and not value.weights:
        losses = _losses_before(value) if options.q is not None else ()
        return JudgeUpdates(run_id, value.party, number, base, accepted, losses)
    trained = {name: n for name, n in value.trained.items() if name not in TRAFFIC}
    trained |= course_of(value.metrics)  # which the evaluation of this round goes on from
    metrics = commit_metrics(job, trained)
    state, weights = value.server_state, value.weights
    noise = value.ledger.round if value.ledger is not None else None
    steps = _applied_steps(value) if options.normalize is not None else ()
    secure = None
    if options.secure_aggregation is not None:
        workers = {each.client: value.roster[each.client].worker_id for each in accepted}
        secure = value.secure.party(workers)
    return AggregateRound(
        *(run_id, value.party, number, base, accepted, state, metrics, weights, noise, steps),
        regions=places_by_region(spec_of(job), accepted, value.roster),
        secure=secure,
        is_control_anew=_is_control_anew(job, value),
    )


def _is_control_anew(job: JobSpec, value: FederatedRun) -> bool:
    """Return True where the common control variate counts on states that clients have lost."""
    states = value.client_states
    return spec_of(job).options.control is not None and states is not None and states.is_incomplete


def _losses_before(value: FederatedRun) -> tuple[float, ...]:
    """Return the losses before training of the clients whose updates count, in their order."""
    found = (value.updates[accepted.client].loss_before for accepted in value.accepted)
    return tuple(loss for loss in found if loss is not None)


def _applied_steps(value: FederatedRun) -> tuple[int, ...]:
    """Return the steps of the clients whose updates count, in their order."""
    found = (value.updates[accepted.client].num_applied_steps for accepted in value.accepted)
    return tuple(number for number in found if number is not None)
