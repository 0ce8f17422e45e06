"""The run value of a federation, and the folds of facts into it.

The folds are pure; decisions.py, roster.py and their neighbours decide on the value.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stratagem.common.base.ids import Digest, Party, WorkerId
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from stratagem.coordinator.core.courses import Deaths
from stratagem.coordinator.core.effects import Base, KeptState
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
    RoundClosed,
    RoundWaits,
    SegmentCommitted,
    SharesRouted,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.strategies.federated import ledgers
from stratagem.coordinator.strategies.federated.ledgers import (
    ClientStates,
    PrivacyLedger,
    RowLedger,
    SecureSetup,
)
from stratagem.coordinator.strategies.schedule import schedule_of

# ---- Attendance ----

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Departure:
    """The reason and the time of a client's departure from an open roster."""

    reason: str
    asked_again_s: float | None = None
    """Leader-clock time before which a client that refused is not asked again, unless its worker
    registers anew. None: the client joins as soon as its worker is here."""
    since_s: float = 0.0
    """Leader-clock time at which the client left."""


@dataclass(frozen=True, slots=True)
class Attendance:
    """The clients that have left, that are awaited, and that are benched."""

    left: Mapping[int, Departure] = field(default_factory=dict)
    """The clients that have left an open roster, until they join again."""
    awaited_until_s: Mapping[int, float] = field(default_factory=dict)
    """For each client without a worker from which something is expected: the leader-clock time at
    which the client counts as gone."""
    waits_until_s: float | None = None
    """Leader-clock time at which the run fails for lack of clients; None: it does not."""
    strikes: Mapping[int, int] = field(default_factory=dict)
    """The number of consecutive rounds in which a client was rejected by its own fault."""
    benched: Mapping[int, int] = field(default_factory=dict)
    """The first round in which a benched client may take part again."""

    @property
    def has_history(self) -> bool:
        """Return True if failures in earlier rounds influence who takes part in later ones."""
        return bool(self.strikes or self.benched)

    def resumed(self) -> "Attendance":
        """Return the attendance of a resumed run: clients that have left may join again."""
        departed = {client: replace(gone, asked_again_s=None) for client, gone in self.left.items()}
        return replace(self, left=departed, awaited_until_s={}, waits_until_s=None)

    def is_able(self, client: int, round_num: int) -> bool:
        """Return True if the client may take part in a round, provided that its worker is here."""
        return client not in self.left and self.benched.get(client, 0) <= round_num

    def awaiting(self, clients: Iterable[int], until_s: float) -> "Attendance":
        """Return the attendance with these clients waited for until a time; those awaited already
        keep theirs."""
        new = dict.fromkeys(clients, until_s)
        return replace(self, awaited_until_s={**new, **self.awaited_until_s})

    def here(self, clients: Iterable[int]) -> "Attendance":
        """Return the attendance with these clients no longer waited for, as they are here."""
        awaited = without(self.awaited_until_s, clients)
        return self if awaited is self.awaited_until_s else replace(self, awaited_until_s=awaited)

    def after_round(self, has_strikes: bool, clients: "Open") -> "Attendance":
        """Return the attendance after a round: an update clears a client's count of failures
        (strikes), and a failure of the client adds one."""
        ended = replace(self, waits_until_s=None)
        if not has_strikes:
            return ended
        strikes = dict(without(self.strikes, clients.updates))
        for client, fact in clients.rejected.items():
            if fact.cause.is_fault:
                strikes[client] = strikes.get(client, 0) + 1
        return replace(ended, strikes=strikes)

    def with_bench(self, fact: ClientBenched) -> "Attendance":
        """Return the attendance with a client benched, and its count of failures cleared."""
        strikes = without(self.strikes, [fact.client])
        return replace(
            self, strikes=strikes, benched={**self.benched, fact.client: fact.until_round}
        )


def without(values: Mapping[int, T], clients: Iterable[int]) -> Mapping[int, T]:
    """Return a mapping without some clients; this very mapping if it has none of them."""
    gone = values.keys() & set(clients)
    if not gone:
        return values
    return {client: value for client, value in values.items() if client not in gone}


# ---- Run value ----


@dataclass(frozen=True, slots=True)
class Late:
    """A client that trains on for a round that was closed without it."""

    round_num: int
    """The round for which the client trains."""
    base: Base
    """The state from which the client trains."""
    member: Member
    membership: int
    """Membership of the client's assignment."""
    num_lr_reductions: int = 0
    """How often a plateau had lowered the learning rates before this round; see RunSegment."""
    update: UpdateReceived | None = None
    """The update, once it has arrived, for the round that closes next."""


@dataclass(frozen=True, slots=True)
class OwedEvaluation:
    """The evaluation of a committed state, kept until its metrics are journaled."""

    base: Base
    clients: tuple[int, ...] | None = None
    """The clients that evaluate the state on their own rows; None: the helper evaluates."""
    states: Mapping[int, KeptState] = field(default_factory=dict)
    """The states that clients had kept when the evaluated state was committed, keyed by client."""
    answers: Mapping[int, ClientEvaluated] = field(default_factory=dict)
    merges: tuple[MetricsMerged, ...] = ()
    """The outcomes of merging the states of metrics, the newest last."""

    @property
    def left(self) -> list[int]:
        """Return the clients whose answers to this evaluation are still missing."""
        return [client for client in self.clients or () if client not in self.answers]


@dataclass(frozen=True, slots=True)
class Losses:
    """The tasks taken from workers, and the process deaths per task, since the last commit."""

    taken: Mapping[Member, tuple[str, ...]] = field(default_factory=dict)
    """The tasks that were taken from each worker."""
    deaths: Mapping[str, Deaths] = field(default_factory=dict)
    """The worker processes that died while they had a task, keyed by task."""

    def with_taken(self, member: Member, task: str) -> "Losses":
        """Return the record with one more task that was taken from a worker."""
        return replace(self, taken={**self.taken, member: (*self.taken.get(member, ()), task)})

    def without(self, tasks: Collection[str]) -> "Losses":
        """Return the record without the deaths of processes that were at these tasks."""
        return replace(self, deaths={t: d for t, d in self.deaths.items() if t not in tasks})

    def hopeless(self, task: str) -> Deaths | None:
        """Return the deaths at a task if they are too many for another try; else None."""
        deaths = self.deaths.get(task)
        return deaths if deaths is not None and deaths.are_too_many else None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A round whose clients are not selected yet."""


@dataclass(frozen=True, slots=True)
class Open:
    """A round whose clients train or have answered."""

    selected: tuple[int, ...] = ()
    """The clients of the round; a private one may have none."""
    num_needed: int | None = None
    """The number of updates with which the round closes; None: all clients must answer."""
    deadline_s: float | None = None
    excused: tuple[Excused, ...] = ()
    """The clients that could not be asked to take part."""
    assigned: Mapping[int, tuple[Member, int]] = field(default_factory=dict)
    """The worker of each client, and the membership of its assignment."""
    holders: frozenset[Member] = frozenset()
    """The workers to which clients are assigned that have not answered yet."""
    num_unassigned: int = 0
    """The number of selected clients that wait for a worker."""
    updates: Mapping[int, UpdateReceived] = field(default_factory=dict)
    rejected: Mapping[int, UpdateRejected] = field(default_factory=dict)
    is_waiting: bool = False
    """True if the round has too few updates, and does not close before there are enough."""
    asks_again_s: float | None = None
    """Leader-clock time at which a waiting round asks again those sites that have refused."""
    tried: Mapping[int, frozenset[Member]] = field(default_factory=dict)
    """The workers on which each client has failed in this round, and is not tried again."""
    secure: SecureSetup = field(default_factory=SecureSetup)
    """The keys and shares that the clients have exchanged, with secure aggregation."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A round whose updates are fixed and become the next state."""

    clients: Open
    """The round as it was when it closed."""
    accepted: tuple[Accepted, ...]
    """The updates; a private round may have none."""
    weights: tuple[float, ...] = ()
    """The weights of the updates; empty until they are judged, or if they are not."""


NOBODY = Open()


@dataclass(frozen=True, slots=True)
class Federation:
    """The run value of a federation: the global state, the round after it, and workers' tasks."""

    party: Party
    membership: int = 0
    lineage: int = 0
    """The number of times that the federation was restored to an earlier commit, after which it
    evaluates states of the same rounds again."""
    helper: tuple[Member, ...] = ()
    """The worker that builds and evaluates; if clients evaluate, the workers of all clients."""
    fingerprint: str = ""
    roster: tuple[ClientBinding, ...] = ()
    num_rows: Mapping[str, int] = field(default_factory=dict)
    committed: Base | None = None
    server_state: tuple[Digest, ...] = ()
    """The state of the server optimizer besides the committed state, one blob per slot."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the newest evaluation."""
    trained: Mapping[str, float] = field(default_factory=dict)
    """Training metrics of the newest closed round; see evaluation.py."""
    round: Waiting | Open | Closed = field(default_factory=Waiting)
    """The round after the committed state."""
    losses: Losses = field(default_factory=Losses)
    late: Mapping[int, Late] = field(default_factory=dict)
    """Late clients, keyed by client; empty if late updates are refused."""
    ledger: PrivacyLedger | None = None
    """The privacy budget of a run that protects clients; None if it does not."""
    rows: RowLedger | None = None
    """The privacy budgets of the clients of a run that protects rows; None if it does not."""
    client_states: ClientStates | None = None
    """The private states of clients; None if clients have none."""
    rejections: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    """(number of closed rounds that have rejected a client, newest reason), keyed by client."""
    attendance: Attendance = field(default_factory=Attendance)
    evaluations: Mapping[int, OwedEvaluation] = field(default_factory=dict)
    """The evaluations that are still owed, keyed by round."""
    took_part: Mapping[int, int] = field(default_factory=dict)
    """The newest round with an update of each client, if clients evaluate."""
    unfit: Mapping[WorkerId, BuildFailed] = field(default_factory=dict)
    """The failed builds, keyed by worker; these workers do not build again."""

    @property
    def round_num(self) -> int:
        """Return the number of the round, from 1; 0 until the model is built."""
        return 0 if self.committed is None else self.committed.segment + 1

    @property
    def clients(self) -> Open:
        """Return the clients of the round, open or closed; none before they are selected."""
        if isinstance(self.round, Closed):
            return self.round.clients
        return self.round if isinstance(self.round, Open) else NOBODY

    @property
    def accepted(self) -> tuple[Accepted, ...]:
        """Return the updates with which the round was closed; none before."""
        return self.round.accepted if isinstance(self.round, Closed) else ()

    def kept_rounds(self, client: int) -> tuple[int, ...]:
        """Return the rounds whose private states a client must still have while it trains."""
        newest = self.client_states.newest if self.client_states else {}
        states = [newest.get(client)]
        states += [owed.states.get(client) for owed in self.evaluations.values()]
        return tuple(sorted({state.round_num for state in states if state is not None}))

    def left_unanswered(self) -> set[int]:
        """Return the selected clients that have left without an answer."""
        clients, absent = self.clients, self.attendance.left
        gone = absent.keys() & set(clients.selected) if absent else set()
        return gone - clients.updates.keys() - clients.rejected.keys()

    def unanswered(self) -> Iterator[int]:
        """Return the selected clients that have neither answered, with an update or a rejection,
        nor left."""
        clients, absent = self.clients, self.attendance.left
        answered = (clients.updates, clients.rejected)
        return (
            c for c in clients.selected if not any(c in who for who in answered) and c not in absent
        )


MAX_CLIENTS_AHEAD = 4
"""The most clients of one worker that are due at once: one trains while updates of others come in.
Bounds the worker's storage, and the work per fact with thousands of clients."""


def spec_of(job: JobSpec) -> Federated:
    assert isinstance(job.strategy, Federated)
    return job.strategy


def has_simulated_states(job: JobSpec) -> bool:
    """Return True if client states are in the store, so that any worker may train any client."""
    return spec_of(job).options.has_client_state and job.data.worker_local is None


def with_clients(value: Federation, clients: Open) -> Federation:
    """Return the run value with the round's clients replaced; unchanged before a round opens."""
    match value.round:
        case Closed() as closed:
            return replace(value, round=replace(closed, clients=clients))
        case Open():
            return replace(value, round=clients)
        case _:
            return value


def reassigned(value: Federation, clients: Open) -> Federation:
    """Return the run value with the round's clients replaced, noting which workers still train."""
    changed, assigned = with_clients(value, clients), clients.assigned
    todo = list(changed.unanswered())
    holders = frozenset(assigned[c][0] for c in todo if c in assigned)
    num_unassigned = sum(c not in assigned for c in todo)
    noted = replace(clients, holders=holders, num_unassigned=num_unassigned)
    return with_clients(changed, noted)


def with_assignments(value: Federation, fact: ClientsAssigned) -> Federation:
    """Return the run value with workers assigned to clients, noting their earlier workers."""
    clients, losses = value.clients, value.losses
    moved = {a.client for a in fact.assignments}
    new = {a.client: (a.member, fact.membership) for a in fact.assignments if a.member}
    for client in sorted(moved & clients.assigned.keys()):
        losses = losses.with_taken(clients.assigned[client][0], task_of(client))
    value = replace(value, membership=fact.membership, losses=losses)
    return reassigned(value, replace(clients, assigned={**without(clients.assigned, moved), **new}))


def lacking(value: Federation, is_here: Callable[[Member], bool]) -> list[int]:
    """Return the clients of the open round that have no worker, or whose worker is gone; fast if
    there are none, because this is called after every fact."""
    clients = value.clients
    if not clients.num_unassigned and all(is_here(member) for member in clients.holders):
        return []
    assigned = clients.assigned
    return [c for c in value.unanswered() if c not in assigned or not is_here(assigned[c][0])]


def due_clients(value: Federation) -> list[int]:
    """Return the clients to train next, in order: a few per worker."""
    clients = value.clients
    num_due = Counter[Member]()
    due = []
    for client in value.unanswered():
        if client not in clients.assigned:
            continue
        member = clients.assigned[client][0]
        if num_due[member] < MAX_CLIENTS_AHEAD:
            num_due[member] += 1
            due.append(client)
            if len(due) == MAX_CLIENTS_AHEAD * len(clients.holders):
                break
    return due


def evaluates_at_clients(job: JobSpec) -> bool:
    """Return True if clients evaluate instead of a helper, because rows that never leave their
    worker can be evaluated only there."""
    return job.data.worker_local is not None and job.evaluation is not None


def with_ledgers(value: Federation, fact: Fact) -> Federation:
    """Return the run value with a fact folded into the ledgers, which outlast the round."""
    return replace(
        value,
        ledger=value.ledger and value.ledger.fold(fact),
        rows=value.rows and value.rows.fold(fact),
        client_states=value.client_states and value.client_states.fold(fact),
    )


def with_selection(value: Federation, fact: ClientsSelected) -> Federation:
    """Return the run value with the round open, or with more clients in it. Late clients that are
    selected again train for this round."""
    clients = replace(
        value.clients,
        selected=fact.clients,
        num_needed=fact.num_needed,
        deadline_s=fact.deadline_s,
        excused=fact.excused,
        is_waiting=False,
        asks_again_s=None,
    )
    attendance = replace(value.attendance, waits_until_s=None)
    late = without(value.late, fact.clients)
    return reassigned(replace(value, round=clients, attendance=attendance, late=late), clients)


def with_exchange(
    job: JobSpec, value: Federation, fact: KeysPosted | SharesRouted, now_s: float
) -> Federation:
    """Return the run value with keys or shares exchanged; once shares are, clients train."""
    rejected = {**value.clients.rejected, **ledgers.rejections(fact)}
    clients = replace(value.clients, rejected=rejected, secure=value.clients.secure.fold(fact))
    if isinstance(fact, SharesRouted):
        clients = replace(clients, deadline_s=deadline_of(job, now_s))
    return reassigned(value, clients)


def with_reply(value: Federation, fact: UpdateReceived | UpdateRejected) -> Federation:
    """Return the run value with the answer of a client folded in: its update or rejection."""
    clients = value.clients
    if isinstance(fact, UpdateRejected):
        rejected = {**clients.rejected, fact.client: fact}
        return with_clients(value, replace(clients, rejected=rejected))
    updates = {**clients.updates, fact.client: fact}
    value = replace(value, trained=_counted(value, fact))
    return with_clients(value, replace(clients, updates=updates))


def with_closing(value: Federation, fact: RoundClosed) -> Federation:
    """Return the run value with its round closed."""
    return replace(
        value,
        round=Closed(value.clients, fact.accepted),
        trained={**value.trained, **fact.metrics},
        attendance=replace(value.attendance, waits_until_s=None),
    )


def with_waiting(value: Federation, fact: RoundWaits) -> Federation:
    """Return the run value without a round deadline, and with failed clients to be asked again."""
    clients, again = value.clients, set(fact.asked_again)
    tried = {
        client: clients.tried.get(client, frozenset()) | {clients.assigned[client][0]}
        for client in (again - set(fact.refused)) & clients.assigned.keys()
    }
    attendance = replace(value.attendance, waits_until_s=fact.until_s)
    losses = value.losses.without({*map(task_of, again)})
    clients = replace(
        clients,
        is_waiting=True,
        deadline_s=None,
        num_needed=fact.num_needed,
        tried=without({**clients.tried, **tried}, fact.refused),
        rejected=without(clients.rejected, again),
        assigned=without(clients.assigned, again),
    )
    return reassigned(replace(value, attendance=attendance, losses=losses), clients)


def again_after_resumption(job: JobSpec, value: Federation, now_s: float) -> Federation:
    """Return the run value with its open round restarted because the run was resumed: workers have
    forgotten the run, failed clients are asked again, and the deadline begins anew."""
    is_secure = spec_of(job).options.secure_aggregation is not None
    if is_secure and not isinstance(value.round, Waiting):
        # The workers have forgotten the secrets of the run.
        value = again_with_new_keys(job, value, value.clients.secure.attempt + 1, now_s)
    clients = value.clients
    again = Open(
        selected=clients.selected,
        num_needed=clients.num_needed,
        deadline_s=deadline_of(job, now_s),
        updates=clients.updates,
        rejected=clients.rejected if isinstance(value.round, Closed) else {},
        secure=clients.secure,
    )
    attendance = value.attendance.resumed()
    fresh = replace(value, helper=(), unfit={}, late={}, losses=Losses(), attendance=attendance)
    return reassigned(fresh, again)


def again_with_new_keys(job: JobSpec, value: Federation, attempt: int, now_s: float) -> Federation:
    """Return the run value with its secure round restarted under new keys, because no sum of the
    round's updates can be unmasked any more."""
    again = replace(
        value.clients,
        secure=SecureSetup(attempt),
        updates={},
        rejected=ledgers.cured(value.clients.rejected),
        deadline_s=deadline_of(job, now_s),
    )
    return reassigned(replace(value, round=again), again)


def deadline_of(job: JobSpec, now_s: float) -> float | None:
    """Return the leader-clock time at which a round that opens now closes with whatever updates it
    has; None: it has no deadline."""
    time_s = spec_of(job).options.round_deadline_s
    return None if time_s is None else now_s + time_s


def task_of(client: int) -> str:
    """Return the key of the worker deaths in a client's training task."""
    return f"client {client}"


def _counted(value: Federation, update: UpdateReceived) -> Mapping[str, float]:
    """Return the run's training metrics plus the steps that an update of an older version reports
    as skipped; updates of newer versions are counted when their round closes."""
    if update.num_steps or SKIPPED_STEPS not in update.metrics:
        return value.trained
    num_skipped = value.trained.get(SKIPPED_STEPS, 0) + update.metrics[SKIPPED_STEPS]
    return {**value.trained, SKIPPED_STEPS: num_skipped}


def after_commit(job: JobSpec, value: Federation, fact: SegmentCommitted) -> Federation:
    """Return the run value before its next round, which begins from the committed state."""
    base = Base(fact.segment, fact.step, fact.digest, average=fact.average)
    has_strikes = spec_of(job).options.strikes is not None
    evaluations, states, evaluators = value.evaluations, value.client_states, None
    if evaluates_at_clients(job):
        evaluators = tuple(accepted.client for accepted in value.accepted)
    if schedule_of(job, value.num_rows).evaluates_at(fact.segment):
        newest = states.newest if states and spec_of(job).options.has_own_models else {}
        digests = {client: newest[client] for client in evaluators or () if client in newest}
        evaluations = {**evaluations, fact.segment: OwedEvaluation(base, evaluators, digests)}
    clients = value.clients
    rejections = {
        client: (value.rejections.get(client, (0, ""))[0] + 1, fact.reason)
        for client, fact in clients.rejected.items()
    }
    return replace(
        value,
        committed=base,
        server_state=fact.server_state,
        round=Waiting(),
        losses=Losses(),
        rejections={**value.rejections, **rejections},
        attendance=value.attendance.after_round(has_strikes, clients),
        evaluations=evaluations,
        took_part={**value.took_part, **dict.fromkeys(evaluators or (), fact.segment)},
    )
