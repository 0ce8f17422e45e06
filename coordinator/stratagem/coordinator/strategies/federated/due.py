"""Derive the effects and the status of a federated run: the build, the clients of the round, the
fold, evaluations.

The functions are pure. `pending` names the effects that a state calls for. The loop starts those
that do not run yet, and a restarted coordinator names the same ones again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from stratagem.common.base.ids import RunId
from stratagem.common.job import JobSpec
from stratagem.common.strategy import ByCapability, is_judged
from stratagem.coordinator.core.courses import course_of, why_stopped
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
from stratagem.coordinator.core.facts import TRAIN_LOSS, Member
from stratagem.coordinator.core.strategy_contract import RunCounts, Status
from stratagem.coordinator.core.world import RunPhase, WorkerRecord, World
from stratagem.coordinator.strategies.federated import closing
from stratagem.coordinator.strategies.federated import roster as open_roster
from stratagem.coordinator.strategies.federated.decisions import candidates_of, is_evaluated_first
from stratagem.coordinator.strategies.federated.evaluation import (
    TRAFFIC,
    mean_loss,
    to_merge,
)
from stratagem.coordinator.strategies.federated.rejections import at_workers, said
from stratagem.coordinator.strategies.federated.run import (
    Closed,
    Federation,
    Open,
    OwedEvaluation,
    Waiting,
    due_clients,
    lacking,
    spec_of,
)
from stratagem.coordinator.strategies.placement import (
    eligible,
    is_site_of,
    places_by_region,
    sites_of,
    why_forgetful,
    why_none,
    why_outdated,
)
from stratagem.coordinator.strategies.schedule import commit_metrics

# ---- Effects ----

T = TypeVar("T")


def pending(
    run_id: RunId, job: JobSpec, value: Federation, horizon: int | None
) -> frozenset[Effect]:
    """Return the effects that are due: build, training of clients, aggregation, evaluations."""
    effects: set[Effect] = set()
    if value.committed is None:
        if value.helper:
            effects.add(Build(run_id, value.party, value.membership, value.helper[0]))
        return frozenset(effects)
    if isinstance(value.round, Closed):
        effects.add(_fold(run_id, job, value, value.round, value.committed))
    elif horizon is None or value.round_num <= horizon:
        effects.update(_training(run_id, job, value))
        effects.update(_accounting(run_id, job, value))
    if horizon is None or value.round_num <= horizon:
        effects.update(closing.effects(run_id, job, value))
    effects.update(_evaluations(run_id, job, value))
    for segment, due in to_merge(job, value):
        if due.member is not None:
            of_round = run_id, value.party, segment, due.member, due.states, due.metrics
            effects.add(MergeMetrics(*of_round))
    return frozenset(effects)


def _training(
    run_id: RunId, job: JobSpec, value: Federation
) -> Iterator[TrainClient | PostKeys | RouteShares]:
    """Yield the exchange of keys or shares that a secure round waits for, or else the training of
    clients that are due."""
    if spec_of(job).options.secure_aggregation is not None and not isinstance(value.round, Waiting):
        workers = {client: value.roster[client].worker_id for client in value.unanswered()}
        may_leave_out = spec_of(job).options.quorum is not None
        of_round = run_id, value.party, value.round_num, workers
        if due := value.clients.secure.due(*of_round, may_leave_out=may_leave_out):
            yield due
            return
    for client in due_clients(value):
        yield closing.training(run_id, job, value, client, closing.of_open_round(value, client))


def _accounting(run_id: RunId, job: JobSpec, value: Federation) -> Iterator[AccountRound]:
    """Yield the privacy accounting of the next round of a private run, if there is a next round."""
    if (
        value.ledger is None
        or value.ledger.round is not None
        or not isinstance(value.round, Waiting)
        or not value.roster
        or is_evaluated_first(job, value)
    ):
        return
    if value.round_num <= spec_of(job).rounds and not why_stopped(job, value.metrics):
        candidates = candidates_of(job, value)
        yield value.ledger.due(run_id, value.party, value.round_num, candidates)


def _evaluations(run_id: RunId, job: JobSpec, value: Federation) -> Iterator[EvaluateState]:
    """Yield the evaluations that are due, of each worker those of the oldest state: a worker
    refuses a state that is older than one that it has begun to evaluate."""
    busy = set[Member]()
    for _, owed in sorted(value.evaluations.items()):
        effects = [*_evaluating(run_id, job, value, owed)]
        yield from (effect for effect in effects if busy.isdisjoint(effect.members))
        busy.update(*(effect.members for effect in effects))


def _evaluating(
    run_id: RunId, job: JobSpec, value: Federation, owed: OwedEvaluation
) -> Iterator[EvaluateState]:
    """Yield the effects that evaluate a state: by the helper, or by every client of the round on
    its own rows."""
    if job.evaluation is None or not value.helper:
        return
    base = owed.base
    if job.evaluation.of == "average" and base.average:
        base = replace(base, digest=base.average)
    of_state = run_id, value.party, 0, base, (job.evaluation.split,)
    if owed.clients is None:
        yield EvaluateState(*of_state, value.helper[:1], lineage=value.lineage)
        return
    here = {member.worker_id: member for member in value.helper}
    for client in owed.left:
        member = here.get(value.roster[client].worker_id)
        if member is not None:
            state = owed.states.get(client)
            yield EvaluateState(*of_state, (member,), client=client, client_state=state)


def _fold(
    run_id: RunId, job: JobSpec, value: Federation, closed: Closed, base: Base
) -> JudgeUpdates | AggregateRound:
    number, accepted, weights = value.round_num, closed.accepted, closed.weights
    options, updates = spec_of(job).options, closed.clients.updates
    if (options.q is not None or is_judged(options.robust)) and not weights:
        losses: tuple[float, ...] = ()
        if options.q is not None:
            losses = _without_none(updates[update.client].loss_before for update in accepted)
        return JudgeUpdates(run_id, value.party, number, base, accepted, losses)
    trained = {name: n for name, n in value.trained.items() if name not in TRAFFIC}
    trained |= course_of(value.metrics)  # which the evaluation of this round goes on from
    steps: tuple[int, ...] = ()
    if options.normalize is not None:
        steps = _without_none(updates[update.client].num_applied_steps for update in accepted)
    noise = None if value.ledger is None else value.ledger.round
    secure = None
    if options.secure_aggregation is not None:
        workers = {update.client: value.roster[update.client].worker_id for update in accepted}
        secure = closed.clients.secure.party(workers)
    return AggregateRound(
        *(run_id, value.party, number, base, accepted, value.server_state),
        *(commit_metrics(job, trained), weights, noise, steps),
        regions=places_by_region(spec_of(job), accepted, value.roster),
        secure=secure,
        is_control_anew=value.client_states is not None and value.client_states.are_due_anew,
    )


def _without_none(numbers: Iterable[T | None]) -> tuple[T, ...]:
    return tuple(number for number in numbers if number is not None)


# ---- Status ----
#
# The status is for people and for the enclosing strategy.


def status(job: JobSpec, value: Federation, world: World) -> Status:
    """Return the run's status, for people."""
    strategy = spec_of(job)
    phase, strategy_phase, reason = _phase(job, value, world)
    done = value.committed.segment if value.committed else 0
    clients, num_left = value.clients, len(value.left_unanswered())
    members = clients.holders | set(value.helper)
    return Status(
        phase=phase,
        strategy_phase=strategy_phase,
        reason=reason,
        step=done,
        num_steps=strategy.rounds,
        segment=done,
        num_segments=strategy.rounds,
        num_clients_done=len(clients.updates) + len(clients.rejected) + num_left,
        num_clients=len(clients.selected),
        members=tuple(sorted(members, key=lambda m: m.worker_id)),
        counts=_counts(value),
    )


def _counts(value: Federation) -> RunCounts:
    clients = value.clients
    num_done = len(clients.updates) + len(clients.rejected)
    return RunCounts(
        unit="rounds",
        part_done=num_done / (len(clients.selected) + 1),  # the last part is the aggregation
        loss=mean_loss(clients.updates) or value.trained.get(TRAIN_LOSS, 0.0),
        num_clients_rejected=len(clients.rejected),
        num_clients_late=len(value.late),
    )


def _phase(job: JobSpec, value: Federation, world: World) -> tuple[RunPhase, str, str]:
    if value.attendance.waits_until_s is not None and not value.clients.selected:
        phase = RunPhase.PLACING if value.committed is None else RunPhase.RECOVERING
        return phase, "WAITING", open_roster.lack(job, value, world, usable(job, value, world))
    if value.committed is None and not value.helper:
        return RunPhase.PLACING, "WAITING", _why_no_roster(job, value, world)
    if value.committed is None:
        return RunPhase.RUNNING, "BUILDING", ""
    if not value.roster and open_roster.roster_of(job) is None:
        return RunPhase.PLACING, "WAITING", _why_no_roster(job, value, world)
    match value.round:
        case Closed():
            return RunPhase.RUNNING, "AGGREGATING", ""
        case Open() as clients:
            return _of_round(job, value, clients, world)
        case _:
            return RunPhase.RUNNING, "SELECTING", _why_not_evaluated(value)


def _of_round(
    job: JobSpec, value: Federation, clients: Open, world: World
) -> tuple[RunPhase, str, str]:
    """Return the status of an open round: the run's phase, the strategy's phase, and a sentence
    that says who has answered and who is missing."""
    answered, num_gone = len(clients.updates) + len(clients.rejected), len(value.left_unanswered())
    count = f"round {value.round_num}: {answered} of {len(clients.selected)} clients have answered"
    if num_gone:
        count += f", {num_gone} left"
    if num_excused := sum(len(excuse.clients) for excuse in clients.excused):
        count += f", {num_excused} not asked"
    if clients.rejected:
        count += f", {len(clients.rejected)} rejected ({said(job, value)})"
    count += "".join(f"; {closed}" for closed in open_roster.closed_sites(value))
    if clients.is_waiting and not lacking(value, world.holds):
        waits_for = (
            "more clients" if open_roster.roster_of(job) else "other workers of failed clients"
        )
        count += f"; that is too few: it waits for {waits_for}"
        return RunPhase.RECOVERING, "TRAINING", count
    is_secure = spec_of(job).options.secure_aggregation is not None
    if is_secure and not clients.secure.routed:
        return RunPhase.RUNNING, "SHARING", f"{count}; keys and shares are exchanged"
    if value.late:
        count += f", {len(value.late)} of earlier rounds train on"
    if lost := lacking(value, world.holds):
        count += f"; without a worker: {at_workers(value, lost[:4])}"
        return RunPhase.RECOVERING, "TRAINING", count
    return RunPhase.RUNNING, "TRAINING", count


def usable(job: JobSpec, value: Federation, world: World) -> list[WorkerRecord]:
    """Return the workers that can train clients of this run."""
    workers = eligible(job, world, value.fingerprint)
    if job.data.worker_local is None:
        return workers
    return [w for w in workers if is_site_of(job, w)]


def _why_not_evaluated(value: Federation) -> str:
    """Return a sentence that names absent clients for whose rows an evaluation waits, or ""."""
    here = {member.worker_id for member in value.helper}
    for owed in value.evaluations.values():
        away = [c for c in owed.left if value.roster[c].worker_id not in here]
        if away:
            names = at_workers(value, away[:4])
            return f"round {owed.base.segment} waits to be evaluated by {names}, not here"
    return ""


def _why_no_roster(job: JobSpec, value: Federation, world: World) -> str:
    strategy = spec_of(job)
    usable = eligible(job, world, value.fingerprint)
    if not usable:
        return why_none(job, world, value.fingerprint)
    if job.data.worker_local is not None:
        having = [w for w in usable if is_site_of(job, w)]
        needed = f"{strategy.num_clients} workers with data {job.data.worker_local!r}"
        if (sites := sites_of(strategy)) is not None:
            having = [w for w in having if w.member.worker_id in sites]
            needed += " that options.regions names"
        forgetful = why_forgetful(job, usable)
        more = "".join(f"; {why}" for why in (forgetful, why_outdated(world)) if why)
        return f"{needed} are needed, {len(having)} are here{more}"
    if isinstance(strategy.client_selection, ByCapability):
        tags = ", ".join(strategy.client_selection.required_tags)
        return f"no client has a worker with the tags {tags}"
    return why_none(job, world, value.fingerprint)
