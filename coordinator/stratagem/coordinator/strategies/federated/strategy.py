"""Federated averaging: clients train on rows that only they have, the coordinator averages.

FedAvg, https://arxiv.org/abs/1602.05629; FedProx adds a term to the clients' loss, and FedYogi and
its kin hand the mean to an optimizer on the coordinator. One round:

    SELECTING    draw the clients of the round from the roster
    TRAINING     each trains from the global state; its update is pulled into the spool
    AGGREGATING  w = sum n_k w_k / sum n_k over the accepted updates, in client order
    (commit)     the new global state is a blob; next round

A lost client is trained again elsewhere, or waited for, where its rows are on one worker; the
journal has the digest of the state that it keeps between rounds (ledgers.py). Only a deadline with
a quorum, or over-selection, leaves clients out (closing.py).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from stratagem.common.base.ids import NO_DIGEST, Digest, Party
from stratagem.common.job import JobSpec
from stratagem.common.numerics.verification import joint_digest
from stratagem.coordinator.core.courses import course_of
from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import (
    TRAIN_LOSS,
    BuildFailed,
    ClientBenched,
    ClientEvaluated,
    ClientLeft,
    ClientsAssigned,
    ClientsJoined,
    ClientsSelected,
    ClientStateLost,
    Evaluated,
    Fact,
    KeysPosted,
    Member,
    MembersFormed,
    MetricsMerged,
    ModelBuilt,
    ProcessDied,
    RosterFormed,
    RoundAccounted,
    RoundClosed,
    RoundRestarted,
    RoundWaits,
    RunFailed,
    RunResumed,
    SegmentCommitted,
    SharesRouted,
    UpdateReceived,
    UpdateRejected,
    UpdatesJudged,
)
from stratagem.coordinator.core.strategy_calls import WHY, draws_in_secret
from stratagem.coordinator.core.strategy_contract import (
    VERSION,
    NestedProgress,
    Nesting,
    Repeating,
    Strategy,
)
from stratagem.coordinator.core.world import WorkerRecord, World
from stratagem.coordinator.strategies.federated import closing, ledgers
from stratagem.coordinator.strategies.federated import roster as open_roster
from stratagem.coordinator.strategies.federated.closing import ask_again, begin_again, close
from stratagem.coordinator.strategies.federated.decisions import (
    assign,
    bench,
    build_failed,
    complete,
    fit,
    form_roster,
    is_evaluated_first,
    new_helper,
    next_round,
    private_round,
    stopped_early,
    with_build,
)
from stratagem.coordinator.strategies.federated.due import pending, status, usable
from stratagem.coordinator.strategies.federated.evaluation import (
    evaluated,
    evaluated_without,
    evaluation_crashed,
    merging,
    with_answer,
)
from stratagem.coordinator.strategies.federated.ledgers import ClientStates
from stratagem.coordinator.strategies.federated.rejections import (
    crashed,
    forbidden,
    in_closed_rounds,
    too_deadly,
    with_death,
    with_helper,
)
from stratagem.coordinator.strategies.federated.run import (
    Attendance,
    Closed,
    Federation,
    Open,
    Waiting,
    after_commit,
    again_after_resumption,
    again_with_new_keys,
    has_simulated_states,
    spec_of,
    with_assignments,
    with_closing,
    with_exchange,
    with_ledgers,
    with_reply,
    with_selection,
    with_waiting,
)
from stratagem.coordinator.strategies.schedule import is_evaluated


def decide(job: JobSpec, value: Federation, world: World, now_s: float) -> Fact | None:
    """Return the next fact of the run that follows from its state and the present workers."""
    return decide_round(job, value, world, now_s, lambda workers: assign(job, value, workers))


def decide_round(
    job: JobSpec,
    value: Federation,
    world: World,
    now_s: float,
    train: Callable[[list[WorkerRecord]], Fact | None],
) -> Fact | None:
    """Return the run's next fact; `train` returns that about clients while a round is open."""
    fact = _decided(job, value, world, now_s, train)
    if (
        isinstance(fact, RunFailed)
        and draws_in_secret(job)
        and not isinstance(value.round, Waiting)
    ):
        why = f"round {value.round_num} cannot be closed as the job asks: clients have failed, or "
        return RunFailed(reason=f"{why}are too few; {WHY}, so only the journal says which")
    return fact


def _decided(
    job: JobSpec,
    value: Federation,
    world: World,
    now_s: float,
    train: Callable[[list[WorkerRecord]], Fact | None],
) -> Fact | None:
    workers = usable(job, value, world)
    if failed := forbidden(job, value) or build_failed(job, value, workers) or too_deadly(value):
        return failed
    are_enough, fact = _gathered(job, value, workers, now_s)
    if not are_enough:
        return fact  # nothing is built for clients that are not here
    if helper := new_helper(job, value, fit(value, workers)):
        return helper
    if value.committed is None:
        return None
    fact = evaluation_crashed(value) or evaluated(job, value) or evaluated_without(job, value)
    if fact := fact or open_roster.departed(job, value, world, now_s):
        return fact
    if not value.roster and open_roster.roster_of(job) is None:
        return form_roster(job, value, workers)
    if value.committed.segment == spec_of(job).rounds:
        return complete(job, value)
    if given_up := closing.give_up(value, workers):
        return given_up
    if isinstance(value.round, Waiting):
        return _next_round(job, value, world, workers, now_s)
    if isinstance(value.round, Closed):
        return None
    ended = crashed(value) or begin_again(job, value, now_s) or close(job, value, workers, now_s)
    return ended or ask_again(job, value, workers, now_s) or train(workers)


def _gathered(
    job: JobSpec, value: Federation, workers: list[WorkerRecord], now_s: float
) -> tuple[bool, Fact | None]:
    """Return True if enough workers are here to build the model, else False; and a fact to journal
    first, if any."""
    if value.committed is not None or value.helper:
        return True, None
    if open_roster.roster_of(job) is not None:
        return open_roster.before_build(job, value, workers, now_s)
    return form_roster(job, value, workers) is not None, None


def _next_round(
    job: JobSpec, value: Federation, world: World, workers: list[WorkerRecord], now_s: float
) -> Fact | None:
    """Return the fact that opens the next round, or that ends the run if its evaluations call for
    it; None while clients, or an evaluation that may end the run, are missing."""
    if is_evaluated_first(job, value):
        return None
    if ended := stopped_early(job, value) or bench(job, value):
        return ended
    if open_roster.roster_of(job) is not None:
        return open_roster.next_round(job, value, world, workers, now_s)
    if value.ledger is not None:
        return private_round(job, value, value.ledger, now_s)
    return next_round(job, value, now_s)


def transition(job: JobSpec, value: Federation, fact: Fact, now_s: float) -> Federation:
    """Return the run value with one fact folded in."""
    value = with_ledgers(value, fact)
    if closing.is_late(value, fact):
        return closing.with_late(value, fact)
    match fact:
        case MembersFormed():
            return open_roster.awaiting_evaluators(job, with_helper(value, fact), now_s)
        case ProcessDied():
            return with_death(value, fact, now_s)
        case ModelBuilt() | BuildFailed():
            return with_build(job, value, fact)
        case RosterFormed():
            return replace(value, roster=fact.clients)
        case SegmentCommitted():
            committed = closing.after_commit(job, after_commit(job, value, fact))
            return open_roster.awaiting_evaluators(job, committed, now_s)
        case Evaluated() | ClientEvaluated() | MetricsMerged():
            return with_answer(job, value, fact)
        case RunResumed():
            again = again_after_resumption(job, value, now_s)
            return open_roster.awaiting_all(job, again, now_s)
        case ClientsJoined():
            return open_roster.with_joined(job, value, fact, now_s)
        case ClientLeft():
            return open_roster.with_left(value, fact.client, fact.reason, now_s)
        case ClientBenched():
            return replace(value, attendance=value.attendance.with_bench(fact))
        case _:
            return _in_round(job, value, fact, now_s)


def _in_round(job: JobSpec, value: Federation, fact: Fact, now_s: float) -> Federation:
    """Return the run value with a fact of the round, from its opening to its commit, folded in."""
    match fact:
        case ClientsSelected():
            return open_roster.awaiting_all(job, with_selection(value, fact), now_s)
        case KeysPosted() | SharesRouted():
            return with_exchange(job, value, fact, now_s)
        case ClientsAssigned():
            assigned = with_assignments(value, fact)
            return open_roster.after_assignment(job, assigned, fact, now_s)
        case UpdateReceived():
            return with_reply(value, fact)
        case UpdateRejected() if open_roster.is_refusal(job, fact):
            again_s = now_s + (fact.opens_in_s or open_roster.ASK_AGAIN_S)
            return open_roster.with_left(value, fact.client, fact.reason, now_s, again_s)
        case UpdateRejected():
            return open_roster.asking_again(with_reply(value, fact), now_s)
        case RoundWaits():
            return open_roster.asking_again(with_waiting(value, fact), now_s)
        case RoundClosed():
            return closing.after_close(job, with_closing(value, fact))
        case RoundRestarted():
            return again_with_new_keys(job, value, fact.attempt, now_s)
        case UpdatesJudged():
            assert isinstance(value.round, Closed)
            return replace(value, round=replace(value.round, weights=fact.weights))
        case _:
            return value


def reject_reason(_job: JobSpec, value: Federation, fact: Fact) -> str:
    """Return the reason why a reported fact is stale or late; "" if it is expected."""
    match fact:
        case UpdateReceived() | UpdateRejected():
            return _why_unwelcome(value, fact)
        case ClientStateLost():
            answer = UpdateRejected(
                party=fact.party, round_num=fact.round_num, client=fact.client, reason=fact.reason
            )
            return _why_unwelcome(value, answer)
        case KeysPosted() | SharesRouted():
            is_open = isinstance(value.round, Open) and fact.round_num == value.round_num
            secure = value.clients.secure
            return secure.refuses(fact) if is_open else f"round {fact.round_num} is not open"
        case _:
            is_due, why_not = _is_due(value, fact)
            return "" if is_due else why_not


def _is_due(value: Federation, fact: Fact) -> tuple[bool, str]:
    """Return True if the run waits for the fact; and the reason to refuse it otherwise."""
    current, number = value.round, value.round_num
    match fact:
        case ModelBuilt() | BuildFailed():
            return value.committed is None, "the model is built already"
        case RoundAccounted():
            waits = isinstance(current, Waiting) and fact.round_num == number
            is_due = waits and value.ledger is not None and value.ledger.round is None
            return is_due, f"round {fact.round_num} does not wait to be accounted"
        case SegmentCommitted():
            is_due = isinstance(current, Closed) and fact.segment == number
            return is_due, f"round {number} is to be committed next"
        case RoundRestarted():
            is_next = fact.attempt == value.clients.secure.attempt + 1
            is_due = isinstance(current, Closed) and is_next and fact.round_num == number
            return is_due, f"round {fact.round_num} is not to be restarted"
        case UpdatesJudged():
            waits = isinstance(current, Closed) and bool(current.accepted) and not current.weights
            is_due = waits and fact.round_num == number
            return is_due, f"round {fact.round_num} does not wait for a verdict"
        case Evaluated() | ClientEvaluated() | MetricsMerged():
            return _is_evaluation_due(value, fact)
        case _:
            return False, f"no round waits for {type(fact).__name__}"


def _is_evaluation_due(
    value: Federation, fact: Evaluated | ClientEvaluated | MetricsMerged
) -> tuple[bool, str]:
    owed, text = value.evaluations.get(fact.segment), f"round {fact.segment} does not wait for"
    match fact:
        case Evaluated():
            return owed is not None, f"{text} an evaluation"
        case ClientEvaluated():
            is_due = owed is not None and fact.client in owed.left
            return is_due, f"{text} client {fact.client}"
        case _:
            due = None if owed is None else merging(value, owed)
            is_due = due is not None and tuple(client for client, _ in due.states) == fact.clients
            return is_due, f"{text} these metrics"


def begun(job: JobSpec, party: Party) -> Federation:
    """Return the run value of a new run, before any fact."""
    states = None
    if spec_of(job).options.has_client_state:
        are_summed = spec_of(job).options.control is not None
        states = ClientStates(are_blobs=has_simulated_states(job), are_summed=are_summed)
    ledger, rows = ledgers.privacy_ledger(job), ledgers.row_ledger(job)
    return Federation(party, ledger=ledger, rows=rows, client_states=states)


def own_deadline(value: Federation) -> float | None:
    """Return the leader-clock time of the next deadline: the round closes, sites are asked again,
    or the wait for clients ends."""
    times = [open_roster.deadline(value)]
    if isinstance(value.round, Open):
        times += [value.round.deadline_s, value.round.asks_again_s]
    return min((time for time in times if time is not None), default=None)


def deaths(value: Federation, member: Member) -> tuple[ProcessDied, ...]:
    """Return the fact that counts the death of a worker process against its tasks in this round."""
    return (ProcessDied(party=value.party, member=member, segment=value.round_num),)


def blobs(value: Federation) -> frozenset[Digest]:
    """Return the states that the store must keep: the global state, those of the server optimizer
    and of simulated clients, and those to evaluate, even while no worker can do it."""
    needed = {*value.server_state} if value.committed else set()
    bases = [value.committed] if value.committed else []
    for owed in value.evaluations.values():
        bases.append(owed.base)
        needed |= {answer.states for answer in owed.answers.values() if answer.states}
    needed |= {digest for base in bases for digest in (base.digest, base.average) if digest}
    if value.client_states is not None:
        needed |= value.client_states.blobs
    return frozenset(needed) | closing.blobs(value) | value.clients.secure.blobs


def progress(value: Federation) -> NestedProgress:
    """Return the progress of the federation, up to the committed round."""
    metrics, loss = {**value.trained, **value.metrics}, value.trained.get(TRAIN_LOSS, 0.0)
    return NestedProgress(
        *(value.committed, metrics, value.num_rows, loss),
        is_idle=not value.evaluations,
        keeps_more=bool(
            value.server_state
            or value.late
            or value.attendance.has_history
            or value.client_states is not None
        ),
        rejected=in_closed_rounds(value),
    )


def rebase(_job: JobSpec, value: Federation, base: Base, num_rows: Mapping[str, int]) -> Federation:
    """Return the federation restarted from the given state; its server optimizer starts afresh."""
    return replace(
        Federation(value.party),
        membership=value.membership + 1,
        lineage=value.lineage,
        helper=value.helper,
        fingerprint=value.fingerprint,
        roster=value.roster,
        attendance=Attendance(left=value.attendance.resumed().left),
        num_rows=num_rows,
        committed=base,
        ledger=value.ledger and value.ledger.returned(),
        rows=value.rows,
        client_states=value.client_states and value.client_states.returned(),
    )


def returned(
    job: JobSpec, value: Federation, base: Base, metrics: Mapping[str, float]
) -> Federation:
    """Return the federation after a return to an earlier commit of its own, which had these
    metrics. Evaluations up to that commit are still owed, as they may come some rounds later."""
    segment, course = base.segment, course_of(metrics)
    evaluated = {name: n for name, n in metrics.items() if is_evaluated(job, name)} | course
    return replace(
        rebase(job, value, base, value.num_rows),
        trained={name: n for name, n in metrics.items() if name not in evaluated},
        metrics=evaluated,
        evaluations={n: owed for n, owed in value.evaluations.items() if n <= segment},
        took_part={client: min(number, segment) for client, number in value.took_part.items()},
    )


def restored(job: JobSpec, value: Federation, earlier: Federation) -> Federation:
    """Return the federation of this party as it goes on from the commit of an earlier run value,
    the states of its server optimizer and of simulated clients included."""
    if earlier.committed is None:
        earlier = begun(job, value.party)
    membership, lineage = value.membership + 1, value.lineage + 1
    return replace(earlier, party=value.party, membership=membership, lineage=lineage)


def digest(value: Federation) -> Digest:
    """Return a digest of all states that the next round begins from: the global one, those of the
    server optimizer and of simulated clients."""
    committed = value.committed.digest if value.committed else NO_DIGEST
    states = value.client_states.blobs_by_client if value.client_states else ()
    if not value.server_state and not states:
        return committed
    return joint_digest((committed, *value.server_state, *states))


def workers(value: Federation) -> Iterable[Member]:
    """Return the workers that build, evaluate or train clients."""
    return (*value.helper, *value.clients.holders)


def _why_unwelcome(value: Federation, fact: UpdateReceived | UpdateRejected) -> str:
    """Return the reason why a client's update or rejection is stale; "" if it is expected."""
    clients, round_num, client = value.clients, fact.round_num, fact.client
    if closing.is_late(value, fact):
        has_answered = value.late[client].update is not None
        return f"client {client} has answered round {round_num} already" if has_answered else ""
    if round_num != value.round_num or isinstance(value.round, Closed):
        return f"round {round_num} is closed"
    if fact.attempt != clients.secure.attempt:
        return f"attempt {fact.attempt} of round {round_num} is over"
    if client not in clients.selected:
        return f"client {client} was not selected in round {round_num}"
    if client in clients.updates or client in clients.rejected:
        return f"client {client} has answered round {round_num} already"
    if isinstance(fact, UpdateRejected) and client in value.attendance.left:
        return f"client {client} has left round {round_num}"
    return ""


STRATEGY = Strategy(
    version=VERSION,
    init=lambda job, party, _strategies: begun(job, party),
    decide=decide,
    transition=transition,
    reject_reason=reject_reason,
    pending=pending,
    status=status,
    own_deadline=own_deadline,
    own_deaths=deaths,
    own_blobs=blobs,
    own_workers=workers,
    nesting=Nesting(progress, rebase, returned),
    repeating=Repeating(lambda value: value.committed, restored, digest),
)
"""The strategy of federated averaging; clients never exchange tensors with each other."""
