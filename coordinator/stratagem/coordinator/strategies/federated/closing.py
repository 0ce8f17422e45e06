"""Close a federated round: decide when it closes and with which updates, and what follows if they
are too few.

The functions are pure functions of the run value and of the present workers; strategy.py calls
them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from stratagem.common.base.ids import Digest, RunId
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated, fewest_updates
from stratagem.coordinator.core.courses import num_lr_reductions
from stratagem.coordinator.core.effects import TrainClient
from stratagem.coordinator.core.facts import (
    SKIPPED_STEPS,
    Accepted,
    Assignment,
    ClientsAssigned,
    Fact,
    RoundClosed,
    RoundRestarted,
    RoundWaits,
    RunFailed,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.core.world import WorkerRecord
from stratagem.coordinator.strategies.federated import ledgers
from stratagem.coordinator.strategies.federated import roster as open_roster
from stratagem.coordinator.strategies.federated.decisions import quorum_of, worker_for
from stratagem.coordinator.strategies.federated.evaluation import round_metrics
from stratagem.coordinator.strategies.federated.rejections import (
    commonest_error,
    commonest_first,
    names,
    said,
)
from stratagem.coordinator.strategies.federated.run import (
    Federation,
    Late,
    Open,
    due_clients,
    spec_of,
    without,
)

# ---- Closing ----

WAIT = "wait"


def begin_again(job: JobSpec, value: Federation, now_s: float) -> RoundRestarted | RunFailed | None:
    """Return the fact that restarts with new keys a secure round of which no sum can be unmasked
    any more, or fails the run if that cannot help; None if a sum can be unmasked."""
    spec = spec_of(job).options.secure_aggregation
    if spec is None:
        return None
    clients, secure = value.clients, value.clients.secure
    is_late = _is_late(clients, now_s) and bool(secure.routed)
    unanswered = () if is_late else value.unanswered()
    why = secure.lack(spec, {*clients.updates, *unanswered})
    if not why:
        return None
    reason = f"round {value.round_num}: of {len(clients.selected)} clients {why}"
    if clients.rejected:
        reason += f"; {commonest_first(job, value)}"
    has_attempts = secure.attempt + 1 < ledgers.MAX_ATTEMPTS
    if has_attempts and ledgers.may_be_cured(clients.rejected):
        return RoundRestarted(
            party=value.party,
            round_num=value.round_num,
            attempt=secure.attempt + 1,
            reason=reason,
        )
    return RunFailed(reason=reason, error=commonest_error(value))


def _is_late(clients: Open, now_s: float) -> bool:
    return clients.deadline_s is not None and now_s >= clients.deadline_s


def close(
    job: JobSpec, value: Federation, workers: list[WorkerRecord], now_s: float
) -> Fact | None:
    """Return the fact that closes the round once all have answered, its deadline has passed, or
    enough updates are here, or that deals with too few updates; None before."""
    clients, is_secure = value.clients, spec_of(job).options.secure_aggregation is not None
    if is_secure and not clients.secure.routed:
        return None
    num_selected, num_updates = len(clients.selected), len(clients.updates)
    num_answered = num_updates + len(clients.rejected) + len(value.left_unanswered())
    is_late = _is_late(clients, now_s)
    suffices = clients.num_needed is not None and num_updates >= clients.num_needed
    if num_answered < num_selected and not is_late and not suffices:
        return None
    count = f"round {value.round_num}: {num_updates} of {num_selected} updates"
    if num_answered < num_selected:
        count += f", {clients.num_needed} suffice" if suffices else ", deadline passed"
    if num_updates < num_required(job, value):
        return _missing(job, value, workers, count, now_s)
    if clients.rejected:
        count += f", {len(clients.rejected)} rejected ({said(job, value)})"
    if departed := sorted(value.left_unanswered()):
        count += f", {len(departed)} left ({names(job, value, departed)})"
    late = accepted(value)
    if late:
        who = ", ".join(f"client {a.client} of round {value.round_num - a.staleness}" for a in late)
        count += f", {len(late)} late ({who})"
    on_time = [
        Accepted(client=client, digest=update.digest, num_samples=update.num_samples)
        for client, update in clients.updates.items()
    ]
    return RoundClosed(
        party=value.party,
        round_num=value.round_num,
        accepted=tuple(sorted([*on_time, *late], key=lambda update: update.client)),
        reason=count,
        by_policy=num_answered < num_selected
        or bool(late)
        or bool(departed)
        or (is_secure and ledgers.may_be_cured(clients.rejected))
        or (job.privacy is not None and job.privacy.noise == "secret"),  # not in the job
        metrics=_metrics(value),
    )


def _metrics(value: Federation) -> dict[str, float]:
    if (ledger := value.ledger or value.rows) is not None:
        return ledger.metrics
    num_skipped = value.trained.get(SKIPPED_STEPS, 0.0)
    return round_metrics(value.clients.updates, received(value), num_skipped=num_skipped)


def num_required(job: JobSpec, value: Federation) -> int:
    """Return the number of updates without which the round cannot close: the quorum, or else one,
    and at least as many as a robust rule needs; 0 in a private run without a quorum."""
    options, clients = spec_of(job).options, value.clients
    if value.ledger is not None and (options.quorum is None or not clients.selected):
        return 0  # nobody has to take part: the sum is noise then, and counts
    of_rule = fewest_updates(options.robust)
    if options.secure_aggregation is not None:
        of_rule = clients.secure.fewest_survivors(options.secure_aggregation)
    if options.quorum is None:
        return of_rule
    needed = clients.num_needed or quorum_of(options.quorum, len(clients.selected))
    return max(of_rule, needed)


def _missing(
    job: JobSpec, value: Federation, workers: list[WorkerRecord], count: str, now_s: float
) -> Fact | None:
    """Return the fact that follows too few updates: ask other clients, wait, or fail the run."""
    needed, rejected = num_required(job, value), value.clients.rejected
    if rejected:
        count += f"; {commonest_first(job, value)}"
    if needed > 1 or not rejected:
        count += f"; {needed} are needed" if needed > 1 else "; 1 is needed"
    if 1 < needed == fewest_updates(spec_of(job).options.robust):
        count += " for options.robust"
    num_needed = None if spec_of(job).options.quorum is None else needed
    if open_roster.goes_on(job, value):
        more = open_roster.more(job, value, workers, now_s)
        return more or open_roster.wait(job, value, count, now_s, num_needed)
    if spec_of(job).options.on_missing_quorum != WAIT:
        return RunFailed(reason=count, error=commonest_error(value))
    if value.clients.is_waiting:
        return None
    return RoundWaits(
        party=value.party,
        round_num=value.round_num,
        reason=count,
        num_needed=num_needed,
    )


def ask_again(
    job: JobSpec, value: Federation, workers: list[WorkerRecord], now_s: float
) -> RoundWaits | None:
    """Return the fact that asks again those failed clients of a waiting round for which there is
    another worker, or a new process of the worker with their rows; None if there are none. Clients
    whose site has refused are asked periodically, too, as its settings may have changed."""
    clients = value.clients
    if not clients.is_waiting or not clients.rejected:
        return None
    is_time = clients.asks_again_s is not None and now_s >= clients.asks_again_s
    alive = {worker.member.worker_id: worker for worker in workers}
    again, refused = [], []
    for client in sorted(clients.rejected.keys() & clients.assigned.keys()):
        binding = value.roster[client]
        if is_time and clients.rejected[client].cause.is_refusal and binding.worker_id in alive:
            refused.append(client)
            continue
        tried = clients.tried.get(client, frozenset()) | {clients.assigned[client][0]}
        if worker_for(job, binding, alive, Counter(), tried) is not None:
            again.append(client)
    if not again and not refused and not is_time:
        return None
    num_updates, num_selected = len(clients.updates), len(clients.selected)
    return RoundWaits(
        party=value.party,
        round_num=value.round_num,
        reason=f"round {value.round_num}: {num_updates} of {num_selected} updates",
        num_needed=clients.num_needed,
        asked_again=tuple(sorted([*again, *refused])),
        refused=tuple(refused),
    )


# ---- Late updates ----
#
# With `options.late_updates`, clients that a round was closed without train on, and their updates
# enter a later round.
#
# The change that such a client has made to its base is applied to the present state and counts
# n · d^staleness, where staleness is the number of rounds between the one it trained for and the
# one it enters (as in FedAsync, https://arxiv.org/abs/1903.03934, and FedBuff,
# https://arxiv.org/abs/2106.06639).


def max_staleness(job: JobSpec) -> int:
    """Return the number of rounds for which updates of a closed round may still be needed; 0 if
    late updates are refused."""
    strategy = job.strategy
    if not isinstance(strategy, Federated) or strategy.options.late_updates == "refuse":
        return 0
    return strategy.options.max_staleness


def weight(job: JobSpec, accepted: Accepted) -> float:
    """Return the weight of an update in the mean of its round: rows, discounted by staleness."""
    policy = spec_of(job).options.late_updates
    discount = 1.0 if policy == "refuse" else policy.discount
    return float(accepted.num_samples * discount**accepted.staleness)


def after_close(job: JobSpec, value: Federation) -> Federation:
    """Return the run value after a round closes: clients that still train for the round count as
    late from now on, and the late updates that the round took are dropped."""
    if not max_staleness(job):
        return value
    due = {client: of_open_round(value, client) for client in due_clients(value)}
    return replace(value, late={**dict(_training(value)), **due})


def of_open_round(value: Federation, client: int) -> Late:
    """Return a client's training in the open round as a Late record: base, worker, membership."""
    assert value.committed is not None
    num_reductions = num_lr_reductions(value.metrics)
    return Late(value.round_num, value.committed, *value.clients.assigned[client], num_reductions)


def after_commit(job: JobSpec, value: Federation) -> Federation:
    """Return the run value without late clients whose updates would be too old for the next round;
    after the last round, without any late client."""
    is_over = value.round_num > spec_of(job).rounds
    limit = -1 if is_over else max_staleness(job)
    late = {
        c: training
        for c, training in value.late.items()
        if value.round_num - training.round_num <= limit
    }
    return replace(value, late=late)


def is_late(value: Federation, fact: Fact) -> bool:
    """Return True if the fact is about clients that still train for an earlier, closed round."""
    match fact:
        case UpdateReceived() | UpdateRejected():
            clients = [fact.client]
        case ClientsAssigned():
            clients = [assignment.client for assignment in fact.assignments]
        case _:
            return False
    late = [value.late.get(client) for client in clients]
    return all(entry is not None and entry.round_num == fact.round_num for entry in late)


def with_late(value: Federation, fact: Fact) -> Federation:
    """Return the run value with a fact about late clients folded in: an update, which waits for the
    next round to close, or a client that is given up."""
    match fact:
        case UpdateReceived():
            late = replace(value.late[fact.client], update=fact)
            return replace(value, late={**value.late, fact.client: late})
        case UpdateRejected():
            return replace(value, late=without(value.late, [fact.client]))
        case _:
            assert isinstance(fact, ClientsAssigned), "is_late was asked"
            others = without(value.late, [assignment.client for assignment in fact.assignments])
            return replace(value, late=others, membership=fact.membership)


def give_up(value: Federation, workers: list[WorkerRecord]) -> ClientsAssigned | None:
    """Return the fact that gives up the late clients whose worker is lost, as nobody trains them
    again; None if there are none."""
    if not value.late:
        return None
    here = {worker.member for worker in workers}
    lost = {c: training for c, training in _training(value) if training.member not in here}
    if not lost:
        return None
    round_num = min(training.round_num for training in lost.values())
    return ClientsAssigned(
        party=value.party,
        round_num=round_num,
        membership=value.membership + 1,
        assignments=tuple(
            Assignment(client=client, member=None)
            for client, training in sorted(lost.items())
            if training.round_num == round_num
        ),
    )


def accepted(value: Federation) -> list[Accepted]:
    """Return the late updates that the open round would take if it closed now."""
    return [
        Accepted(
            client=client,
            digest=late.update.digest,
            num_samples=late.update.num_samples,
            staleness=value.round_num - late.round_num,
            base=late.base.digest,
        )
        for client, late in sorted(value.late.items())
        if late.update is not None
    ]


def received(value: Federation) -> list[UpdateReceived]:
    """Return the UpdateReceived facts of the late clients that have answered, in client order."""
    return [late.update for _, late in sorted(value.late.items()) if late.update is not None]


def effects(run_id: RunId, job: JobSpec, value: Federation) -> Iterator[TrainClient]:
    """Yield the effects that train the late clients, unchanged from when their round was open."""
    for client, late in _training(value):
        yield training(run_id, job, value, client, late)


def training(run_id: RunId, job: JobSpec, value: Federation, client: int, at: Late) -> TrainClient:
    """Return the effect that trains one client; at: the client's round, base and worker."""
    strategy, states, secure = spec_of(job), value.client_states, value.clients.secure
    return TrainClient(
        run_id=run_id,
        party=value.party,
        membership=at.membership,
        round_num=at.round_num,
        client=client,
        num_clients=strategy.num_clients,
        local_epochs=strategy.options.local_epochs,
        member=at.member,
        base=at.base,
        num_lr_reductions=at.num_lr_reductions,
        clip_norm=value.ledger.round.clip_norm if value.ledger and value.ledger.round else 0.0,
        rows=None if value.rows is None else value.rows.due(client),
        state=None if states is None else states.newest.get(client),
        attempt=secure.attempt,
        routed=secure.routed,
        num_members=len(secure.members),
    )


def blobs(value: Federation) -> frozenset[Digest]:
    """Return the states from which late clients, and accepted late updates, were trained."""
    bases = {late.base.digest for late in value.late.values()}
    return frozenset(bases | {update.base for update in value.accepted if update.base})


def _training(value: Federation) -> Iterator[tuple[int, Late]]:
    for client, late in value.late.items():
        if late.update is None:
            yield client, late
