"""This module defines the run value of a federated party and the folds of facts into it.

The folds are pure; decisions.py, roster.py and their neighbours decide on the value.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stratagem.common.base.ids import Digest, Party, WorkerId
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from stratagem.coordinator.core.courses import Deaths
from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import (
    SKIPPED_STEPS,
    Accepted,
    BuildFailed,
    ClientBenched,
    ClientBinding,
    ClientEvaluated,
    ClientsAssigned,
    ClientsSelected,
    Excused,
    Fact,
    KeysPosted,
    Member,
    MetricsMerged,
    RoundAccounted,
    RoundClosed,
    RoundWaits,
    SegmentCommitted,
    SharesRouted,
    UpdateReceived,
    UpdateRejected,
    UpdatesJudged,
)
from stratagem.coordinator.strategies.federated import ledgers, row_ledger
from stratagem.coordinator.strategies.federated.ledgers import (
    ClientStates,
    PrivacyLedger,
    SecureSetup,
)
from stratagem.coordinator.strategies.federated.row_ledger import RowLedger
from stratagem.coordinator.strategies.schedule import schedule_of

# ---- Attendance ----
#
# Attendance records which clients have left, which are awaited, and which sit on the bench.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Departure:
    """Why a client of an open roster has left."""

    reason: str
    asked_again_s: float | None = None
    """Leader-clock time before which it is not asked again, unless its worker registers anew: it
    has refused. None: it joins as soon as its worker is here."""
    since_s: float = 0.0
    """Leader-clock time at which it left."""


@dataclass(frozen=True, slots=True)
class Attendance:
    """What is known of the clients of a federation besides what they answer."""

    left: Mapping[int, Departure] = field(default_factory=dict)
    """The clients that have left, until they join again; of an open roster."""
    awaited_until_s: Mapping[int, float] = field(default_factory=dict)
    """Clients that something is expected of and that have no worker: leader-clock time at which
    they are taken to have left."""
    waits_until_s: float | None = None
    """Leader-clock time at which the run fails for want of clients."""
    excused: tuple[Excused, ...] = ()
    """The clients that could not be asked to take part in the open round."""
    strikes: Mapping[int, int] = field(default_factory=dict)
    """Rounds in a row in which a client was rejected by its own fault."""
    benched: Mapping[int, int] = field(default_factory=dict)
    """The first round in which a benched client may take part again."""

    @property
    def has_history(self) -> bool:
        """True when earlier rounds decide about who takes part in later ones."""
        return bool(self.strikes or self.benched)

    def resumed(self) -> "Attendance":
        """Return the attendance after a run was resumed: whoever has left and is here may join."""
        left = {client: replace(gone, asked_again_s=None) for client, gone in self.left.items()}
        return replace(self, left=left, awaited_until_s={}, waits_until_s=None, excused=())

    def is_able(self, client: int, round_num: int) -> bool:
        """Return True when the client may take part in a round, if its worker is here."""
        return client not in self.left and self.benched.get(client, 0) <= round_num

    def awaiting(self, clients: Iterable[int], until_s: float) -> "Attendance":
        """Return the attendance with more clients that are awaited, unless they are already."""
        new = dict.fromkeys(clients, until_s)
        return replace(self, awaited_until_s={**new, **self.awaited_until_s})

    def here(self, clients: Iterable[int]) -> "Attendance":
        """Return the attendance with clients that need not be awaited any more."""
        awaited = without(self.awaited_until_s, clients)
        return self if awaited is self.awaited_until_s else replace(self, awaited_until_s=awaited)

    def after_round(
        self, has_strikes: bool, answered: Iterable[int], rejected: Mapping[int, UpdateRejected]
    ) -> "Attendance":
        """Return the attendance after a round: who has answered is free of strikes, who has failed
        has one more."""
        ended = replace(self, waits_until_s=None, excused=())
        if not has_strikes:
            return ended
        failed = (client for client, fact in rejected.items() if fact.cause.is_fault)
        strikes = dict(without(self.strikes, answered))
        for client in failed:
            strikes[client] = strikes.get(client, 0) + 1
        return replace(ended, strikes=strikes)

    def with_bench(self, fact: ClientBenched) -> "Attendance":
        """Return the attendance with a client on the bench, where its strikes are forgotten."""
        strikes = without(self.strikes, [fact.client])
        return replace(
            self, strikes=strikes, benched={**self.benched, fact.client: fact.until_round}
        )


def without(values: Mapping[int, T], clients: Iterable[int]) -> Mapping[int, T]:
    """Return a mapping without some clients; the same one where it has none of them."""
    gone = values.keys() & set(clients)
    if not gone:
        return values
    return {client: value for client, value in values.items() if client not in gone}


# ---- Run value ----


@dataclass(frozen=True, slots=True)
class Late:
    """A client that its round was closed without, and that continues to train."""

    round_num: int
    """The round that it trains for."""
    base: Base
    """The state that it trains from."""
    member: Member
    membership: int
    """Membership of its assignment."""
    num_lr_reductions: int = 0
    """See RunSegment; before the round that it trains for."""
    update: UpdateReceived | None = None
    """Set once it has arrived: it enters the round that closes next."""


@dataclass(frozen=True, slots=True)
class FederatedRun:
    """The run value: the global state, the open round, and the work of each worker in it."""

    party: Party
    membership: int = 0
    helper: tuple[Member, ...] = ()
    """The worker that builds and evaluates; where clients evaluate, the workers of all of them."""
    fingerprint: str = ""
    roster: tuple[ClientBinding, ...] = ()
    num_rows: Mapping[str, int] = field(default_factory=dict)
    committed: Base | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest evaluation."""
    trained: Mapping[str, float] = field(default_factory=dict)
    """Training metrics of the newest round that was closed; see evaluation.py."""
    round_num: int = 0
    """The open round, from 1; 0 until the model is built."""
    is_opened: bool = False
    """The clients of the round are selected; of a private one perhaps none."""
    is_closed: bool = False
    ledger: PrivacyLedger | None = None
    """What a run whose clients are protected has spent."""
    rows: RowLedger | None = None
    """What each client has spent of a run whose rows are protected."""
    selected: tuple[int, ...] = ()
    assigned: Mapping[int, tuple[Member, int]] = field(default_factory=dict)
    """Client -> (worker, membership of the assignment)."""
    holders: frozenset[Member] = frozenset()
    """The workers that have clients left to train."""
    num_unassigned: int = 0
    """Selected clients that wait for a worker."""
    updates: Mapping[int, UpdateReceived] = field(default_factory=dict)
    rejected: Mapping[int, UpdateRejected] = field(default_factory=dict)
    rejections: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    """By client: how many closed rounds have rejected it, and why the newest of them did."""
    is_waiting: bool = False
    """The open round has too few updates, and does not close before there are enough."""
    asks_again_s: float | None = None
    """Leader-clock time at which a round that waits asks the sites again that have refused."""
    tried: Mapping[int, frozenset[Member]] = field(default_factory=dict)
    """The workers on which a client has failed in the open round, and is not asked again."""
    server_state: tuple[Digest, ...] = ()
    """What the server optimizer keeps besides the committed state, one blob per slot."""
    accepted: tuple[Accepted, ...] = ()
    """Set once the round is closed; of a private one perhaps none."""
    weights: tuple[float, ...] = ()
    """What each of them counts; empty until they have been judged, and where they are not."""
    num_needed: int | None = None
    """Number of updates with which the open round closes; None: not before all have answered."""
    deadline_s: float | None = None
    late: Mapping[int, Late] = field(default_factory=dict)
    """Late clients, by client; empty where late updates are refused."""
    to_evaluate: tuple[Base, ...] = ()
    evaluators: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Round -> the clients that evaluate it on their own rows; without any, the helper does."""
    evaluations: Mapping[int, Mapping[int, ClientEvaluated]] = field(default_factory=dict)
    """Round -> client -> its answer."""
    merges: Mapping[int, tuple[MetricsMerged, ...]] = field(default_factory=dict)
    """Round -> what has come of merging the states of metrics, the newest last."""
    took_part: Mapping[int, int] = field(default_factory=dict)
    """Client -> the newest round that has its update, where clients evaluate."""
    unfit: Mapping[WorkerId, BuildFailed] = field(default_factory=dict)
    """The workers that cannot build the model, where each has rows of its own."""
    left: Mapping[Member, tuple[str, ...]] = field(default_factory=dict)
    """Tasks that were taken from a worker in this round, because it was lost."""
    deaths: Mapping[str, Deaths] = field(default_factory=dict)
    """By task: the worker processes that ended in this round while they had it to do."""
    attendance: Attendance = field(default_factory=Attendance)
    client_states: ClientStates | None = None
    """What the clients keep to themselves; None where they keep nothing."""
    secure: SecureSetup = field(default_factory=SecureSetup)
    """Of a round with secure aggregation: what its clients have exchanged."""

    def left_unanswered(self) -> set[int]:
        """Return the selected clients that have left without an answer."""
        left = self.attendance.left.keys() & set(self.selected) if self.attendance.left else set()
        return left - self.updates.keys() - self.rejected.keys()

    def unanswered(self) -> Iterator[int]:
        """Return the selected clients of which there is neither an update nor a rejection, and that
        have not left."""
        answered, left = (self.updates, self.rejected), self.attendance.left
        return (c for c in self.selected if not any(c in who for who in answered) and c not in left)


MAX_CLIENTS_AHEAD = 4
"""Clients of one worker that are due at once: one trains while the updates of the others come in.
It bounds what the worker keeps, and the work that every fact makes with thousands of clients."""


def spec_of(job: JobSpec) -> Federated:
    assert isinstance(job.strategy, Federated)
    return job.strategy


def has_simulated_states(job: JobSpec) -> bool:
    """Return True when what clients keep lies in the store: any worker may play any of them."""
    return spec_of(job).options.has_client_state and job.data.worker_local is None


def with_assignments(value: FederatedRun, fact: ClientsAssigned) -> FederatedRun:
    """Assign other workers to some clients, and remember whose they were."""
    moved = {a.client for a in fact.assignments}
    kept = {c: a for c, a in value.assigned.items() if c not in moved}
    new = {a.client: (a.member, fact.membership) for a in fact.assignments if a.member}
    left = dict(value.left)
    for client in sorted(moved & value.assigned.keys()):
        member = value.assigned[client][0]
        left[member] = (*left.get(member, ()), task_of(client))
    return reassigned(replace(value, membership=fact.membership, left=left), {**kept, **new})


def reassigned(value: FederatedRun, assigned: Mapping[int, tuple[Member, int]]) -> FederatedRun:
    """Note which workers train the clients of the open round."""
    todo = list(value.unanswered())
    return replace(
        value,
        assigned=assigned,
        holders=frozenset(assigned[c][0] for c in todo if c in assigned),
        num_unassigned=sum(c not in assigned for c in todo),
    )


def lacking(value: FederatedRun, is_here: Callable[[Member], bool]) -> list[int]:
    """Return the clients of the open round that no worker trains now; asked with every fact, so it
    is quick while there are none."""
    if not value.num_unassigned and all(is_here(member) for member in value.holders):
        return []
    return [
        client
        for client in value.unanswered()
        if client not in value.assigned or not is_here(value.assigned[client][0])
    ]


def due_clients(value: FederatedRun) -> list[int]:
    """Return the clients to be trained next, in order: a few of each worker."""
    num_due = Counter[Member]()
    due = []
    for client in value.unanswered():
        if client not in value.assigned:
            continue
        member = value.assigned[client][0]
        if num_due[member] < MAX_CLIENTS_AHEAD:
            num_due[member] += 1
            due.append(client)
            if len(due) == MAX_CLIENTS_AHEAD * len(value.holders):
                break
    return due


def evaluates_at_clients(job: JobSpec) -> bool:
    """Return True when clients evaluate: rows that never leave their worker can be evaluated only
    there."""
    return job.data.worker_local is not None and job.evaluation is not None


def in_round(value: FederatedRun, fact: Fact) -> FederatedRun:
    """Fold what happens between the opening of a round and its closing."""
    if value.rows is not None:
        value = replace(value, rows=row_ledger.with_fact(value.rows, fact))
    match fact:
        case RoundAccounted() if value.ledger is not None:
            return replace(value, ledger=ledgers.with_fact(value.ledger, fact))
        case ClientsSelected():
            attendance = replace(value.attendance, waits_until_s=None, excused=fact.excused)
            ledger = value.ledger and ledgers.with_opened(value.ledger)
            opened = replace(
                value,
                is_opened=True,
                ledger=ledger,
                selected=fact.clients,
                is_waiting=False,
                deadline_s=fact.deadline_s,
                num_needed=fact.num_needed,
                attendance=attendance,
                asks_again_s=None,
            )
            return reassigned(opened, value.assigned)
        case KeysPosted() | SharesRouted():
            rejected = {**value.rejected, **ledgers.rejections(fact)}
            exchanged = replace(value, rejected=rejected, secure=value.secure.with_fact(fact))
            return reassigned(exchanged, value.assigned)
        case ClientsAssigned():
            return with_assignments(value, fact)
        case UpdateReceived():
            updates = {**value.updates, fact.client: fact}
            return replace(value, updates=updates, trained=_counted(value, fact))
        case UpdateRejected():
            return replace(value, rejected={**value.rejected, fact.client: fact})
        case RoundWaits():
            return _waiting(value, fact)
        case RoundClosed():
            trained = {**value.trained, **fact.metrics}
            attendance = replace(value.attendance, waits_until_s=None)
            return replace(
                value,
                is_closed=True,
                accepted=fact.accepted,
                deadline_s=None,
                asks_again_s=None,
                trained=trained,
                attendance=attendance,
            )
        case UpdatesJudged():
            return replace(value, weights=fact.weights)
        case _:
            return value


def _waiting(value: FederatedRun, fact: RoundWaits) -> FederatedRun:
    """Lift the deadline, and give some of the clients that have failed another chance."""
    again = set(fact.asked_again)
    tried = {
        client: value.tried.get(client, frozenset()) | {value.assigned[client][0]}
        for client in (again - set(fact.refused)) & value.assigned.keys()
    }
    value = replace(
        value,
        is_waiting=True,
        attendance=replace(value.attendance, waits_until_s=fact.until_s),
        deadline_s=None,
        num_needed=fact.num_needed,
        tried={c: who for c, who in {**value.tried, **tried}.items() if c not in fact.refused},
        rejected={c: rejection for c, rejection in value.rejected.items() if c not in again},
        deaths={t: count for t, count in value.deaths.items() if t not in map(task_of, again)},
    )
    return reassigned(value, {c: a for c, a in value.assigned.items() if c not in again})


def again_after_resumption(job: JobSpec, value: FederatedRun, now_s: float) -> FederatedRun:
    """Restart the open round after a resumption: workers have forgotten the run, clients that have
    failed are asked again, and the round has its whole time."""
    if spec_of(job).options.secure_aggregation is not None and value.is_opened:
        # The workers have forgotten the secrets of the run.
        value = again_with_new_keys(job, value, value.secure.attempt + 1, now_s)
    time_s = spec_of(job).options.round_deadline_s
    has_deadline = time_s is not None and value.is_opened and not value.is_closed
    fresh = replace(
        value,
        helper=(),
        rejected={} if not value.is_closed else value.rejected,
        is_waiting=False,
        asks_again_s=None,
        tried={},
        unfit={},
        deadline_s=now_s + time_s if has_deadline and time_s is not None else value.deadline_s,
        late={},
        left={},
        deaths={},
        attendance=value.attendance.resumed(),
    )
    return reassigned(fresh, {})


def again_with_new_keys(
    job: JobSpec, value: FederatedRun, attempt: int, now_s: float
) -> FederatedRun:
    """Restart the open round with secure aggregation: what was masked cannot be unmasked."""
    fresh = replace(
        value,
        secure=SecureSetup(attempt),
        is_closed=False,
        accepted=(),
        updates={},
        rejected=ledgers.cured(value.rejected),
        deadline_s=deadline_of(job, now_s),
    )
    return reassigned(fresh, value.assigned)


def deadline_of(job: JobSpec, now_s: float) -> float | None:
    """Return when a round that is opened now closes with what it has; None: never."""
    time_s = spec_of(job).options.round_deadline_s
    return None if time_s is None else now_s + time_s


def task_of(client: int) -> str:
    """Return the task of a client in a round, as the key of its deaths."""
    return f"client {client}"


def _with_rejections(value: FederatedRun) -> Mapping[int, tuple[int, str]]:
    if not value.rejected:
        return value.rejections
    new = {
        client: (value.rejections.get(client, (0, ""))[0] + 1, fact.reason)
        for client, fact in value.rejected.items()
    }
    return {**value.rejections, **new}


def _counted(value: FederatedRun, update: UpdateReceived) -> Mapping[str, float]:
    """Return the training metrics with the skipped steps of an update that was journaled by a
    version that counted them when it came."""
    if update.num_steps or SKIPPED_STEPS not in update.metrics:
        return value.trained
    num_skipped = value.trained.get(SKIPPED_STEPS, 0) + update.metrics[SKIPPED_STEPS]
    return {**value.trained, SKIPPED_STEPS: num_skipped}


def after_commit(job: JobSpec, value: FederatedRun, fact: SegmentCommitted) -> FederatedRun:
    base = Base(fact.segment, fact.step, fact.digest, average=fact.average)
    has_strikes = spec_of(job).options.strikes is not None
    due = schedule_of(job, value.num_rows).evaluates_at(fact.segment)
    evaluators, took_part = dict(value.evaluators), value.took_part
    states = value.client_states
    if spec_of(job).options.control is not None:
        states = states and states.anew()
    if evaluates_at_clients(job):
        clients = tuple(accepted.client for accepted in value.accepted)
        took_part = {**took_part, **dict.fromkeys(clients, fact.segment)}
        if due:
            evaluators[fact.segment] = clients
        if due and spec_of(job).options.has_own_models:
            states = states and states.with_evaluation(fact.segment, clients)
    return replace(
        value,
        client_states=states,
        took_part=took_part,
        committed=base,
        evaluators=evaluators,
        server_state=fact.server_state,
        round_num=fact.segment + 1,
        ledger=value.ledger and ledgers.with_fact(value.ledger, fact),
        is_opened=False,
        is_closed=False,
        selected=(),
        assigned={},
        holders=frozenset(),
        num_unassigned=0,
        updates={},
        rejected={},
        secure=SecureSetup(),
        rejections=_with_rejections(value),
        attendance=value.attendance.after_round(has_strikes, value.updates, value.rejected),
        is_waiting=False,
        asks_again_s=None,
        tried={},
        accepted=(),
        weights=(),
        left={},
        deaths={},
        to_evaluate=(*value.to_evaluate, base) if due else value.to_evaluate,
    )
