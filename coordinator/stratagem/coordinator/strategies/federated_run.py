"""The run value of a federated party, and how facts change it.

Pure folds; what is decided on the value stands in federated_rounds.py.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from stratagem.common.ids import Digest, Party
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated
from stratagem.coordinator.core.effects import (
    Base,
)
from stratagem.coordinator.core.facts import (
    SKIPPED_STEPS,
    Accepted,
    ClientBinding,
    ClientEvaluated,
    ClientsAssigned,
    ClientsSelected,
    Evaluated,
    Fact,
    Member,
    MembersFormed,
    ProcessDied,
    RoundClosed,
    SegmentCommitted,
    UpdateReceived,
    UpdateRejected,
)
from stratagem.coordinator.strategies.deaths import Deaths, after


@dataclass(frozen=True, slots=True)
class Late:
    """A client that its round was closed without, and that trains on."""

    round_num: int
    """The round that it trains for."""
    base: Base
    """The state that it trains from."""
    member: Member
    membership: int
    """Of its assignment."""
    update: UpdateReceived | None = None
    """Set once it has arrived: it enters the round that closes next."""


@dataclass(frozen=True, slots=True)
class FederatedRun:
    """The global state, the open round, and who does what in it."""

    party: Party
    membership: int = 0
    helper: tuple[Member, ...] = ()
    """The worker that builds and evaluates; those of all clients where these evaluate."""
    fingerprint: str = ""
    roster: tuple[ClientBinding, ...] = ()
    num_rows: Mapping[str, int] = field(default_factory=dict)
    committed: Base | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the newest evaluation."""
    trained: Mapping[str, float] = field(default_factory=dict)
    """Of the training of the newest round that was closed; see round_metrics.py."""
    round_num: int = 0
    """The open round, from 1; 0 until the model is built."""
    selected: tuple[int, ...] = ()
    assigned: Mapping[int, tuple[Member, int]] = field(default_factory=dict)
    """Client -> (worker, membership of the assignment)."""
    holders: frozenset[Member] = frozenset()
    """The workers that have clients left to train."""
    num_unassigned: int = 0
    """Selected clients that wait for a worker."""
    updates: Mapping[int, UpdateReceived] = field(default_factory=dict)
    rejected: Mapping[int, str] = field(default_factory=dict)
    server_state: tuple[Digest, ...] = ()
    """What the server optimizer keeps beside the committed state, one blob per slot."""
    accepted: tuple[Accepted, ...] = ()
    """Set once the round is closed."""
    num_needed: int | None = None
    """The open round closes with so many updates; None: not before all have answered."""
    deadline_s: float | None = None
    late: Mapping[int, Late] = field(default_factory=dict)
    """By client; empty where late updates are refused."""
    to_evaluate: tuple[Base, ...] = ()
    evaluators: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Round -> the clients that evaluate it on their own rows; else the helper does."""
    evaluations: Mapping[int, Mapping[int, Mapping[str, float]]] = field(default_factory=dict)
    """Round -> client -> its sums."""
    left: Mapping[Member, tuple[str, ...]] = field(default_factory=dict)
    """What was taken from a worker in this round, because it was lost."""
    deaths: Mapping[str, Deaths] = field(default_factory=dict)
    """Worker processes that ended in this round while they had this to do."""


MAX_CLIENTS_AHEAD = 4
"""Clients of one worker that are due at once: one trains while the updates of the others come in.
It bounds what the worker keeps, and the work that every fact makes with thousands of clients."""


def spec_of(job: JobSpec) -> Federated:
    assert isinstance(job.strategy, Federated)
    return job.strategy


def with_assignments(value: FederatedRun, fact: ClientsAssigned) -> FederatedRun:
    """Other workers for some clients; remembers whose they were."""
    moved = {a.client for a in fact.assignments}
    kept = {c: a for c, a in value.assigned.items() if c not in moved}
    new = {a.client: (a.member, fact.membership) for a in fact.assignments if a.member}
    assigned = {**kept, **new}
    todo = [c for c in value.selected if c not in value.updates and c not in value.rejected]
    left = dict(value.left)
    for client in sorted(moved & value.assigned.keys()):
        member = value.assigned[client][0]
        left[member] = (*left.get(member, ()), f"client {client}")
    return replace(
        value,
        membership=fact.membership,
        assigned=assigned,
        holders=frozenset(assigned[c][0] for c in todo if c in assigned),
        num_unassigned=sum(c not in assigned for c in todo),
        left=left,
    )


def lacking(value: FederatedRun, is_here: Callable[[Member], bool]) -> list[int]:
    """The clients of the open round that nobody trains now; asked with every fact, so it is quick
    while there are none."""
    if not value.num_unassigned and all(is_here(member) for member in value.holders):
        return []
    return [
        client
        for client in value.selected
        if client not in value.updates
        and client not in value.rejected
        and (client not in value.assigned or not is_here(value.assigned[client][0]))
    ]


def due_clients(value: FederatedRun) -> list[int]:
    """The clients to be trained next, in order: a few of each worker."""
    num_due = Counter[Member]()
    due = []
    for client in value.selected:
        if client in value.updates or client in value.rejected or client not in value.assigned:
            continue
        member = value.assigned[client][0]
        if num_due[member] < MAX_CLIENTS_AHEAD:
            num_due[member] += 1
            due.append(client)
            if len(due) == MAX_CLIENTS_AHEAD * len(value.holders):
                break
    return due


def with_death(value: FederatedRun, died: ProcessDied, now_s: float) -> FederatedRun:
    """A worker process ended: count it against what it did, or all that it had to do."""
    member, tasks = died.member, set(value.left.get(died.member, ()))
    if member in value.helper and (value.committed is None or value.to_evaluate):
        tasks.add(_task_of_helper(value))
    for client, (assigned, _) in value.assigned.items():
        if assigned == member and client not in value.updates and client not in value.rejected:
            tasks.add(f"client {client}")
    if died.at is not None:
        tasks &= {_task_at(value, died.at)}
    deaths = {task: after(value.deaths.get(task, Deaths()), died, now_s, ()) for task in tasks}
    return replace(value, deaths={**value.deaths, **deaths})


def _task_of_helper(value: FederatedRun) -> str:
    return "the build" if value.committed is None else "the evaluation"


def _task_at(value: FederatedRun, at: Party) -> str:
    """What is done in the sessions of a party: see effects.client_round, evaluate and build."""
    name = at.rpartition("/")[2]
    client = name.removeprefix("client")
    return f"client {client}" if client.isdecimal() else _task_of_helper(value)


def with_helper(value: FederatedRun, fact: MembersFormed) -> FederatedRun:
    """Another worker builds and evaluates; remembers what was taken from the one before."""
    left = dict(value.left)
    task = _task_of_helper(value)
    for member in value.helper:
        if member not in fact.members and (value.committed is None or value.to_evaluate):
            left[member] = (*left.get(member, ()), task)
    return replace(
        value,
        membership=fact.membership,
        helper=fact.members,
        fingerprint=fact.fingerprint,
        left=left,
    )


def evaluates_at_clients(job: JobSpec) -> bool:
    """Rows that never leave their worker can be evaluated only there."""
    return job.data.worker_local is not None and job.evaluation is not None


def with_evaluation(value: FederatedRun, fact: ClientEvaluated) -> FederatedRun:
    known = {**value.evaluations.get(fact.segment, {}), fact.client: fact.sums}
    return replace(value, evaluations={**value.evaluations, fact.segment: known})


def evaluators_left(value: FederatedRun, segment: int) -> list[int]:
    done = value.evaluations.get(segment, {})
    return [client for client in value.evaluators.get(segment, ()) if client not in done]


def with_metrics(value: FederatedRun, fact: Evaluated) -> FederatedRun:
    segment = fact.segment
    return replace(
        value,
        to_evaluate=tuple(base for base in value.to_evaluate if base.segment != segment),
        evaluators={n: each for n, each in value.evaluators.items() if n != segment},
        evaluations={n: each for n, each in value.evaluations.items() if n != segment},
        metrics=fact.metrics,
    )


def in_round(value: FederatedRun, fact: Fact) -> FederatedRun:
    """Fold what happens between the opening of a round and its closing."""
    match fact:
        case ClientsSelected():
            return replace(
                value,
                selected=fact.clients,
                num_unassigned=len(fact.clients),
                deadline_s=fact.deadline_s,
                num_needed=fact.num_needed,
            )
        case ClientsAssigned():
            return with_assignments(value, fact)
        case UpdateReceived():
            updates = {**value.updates, fact.client: fact}
            return replace(value, updates=updates, trained=_counted(value, fact))
        case UpdateRejected():
            return replace(value, rejected={**value.rejected, fact.client: fact.reason})
        case RoundClosed():
            trained = {**value.trained, **fact.metrics}
            return replace(value, accepted=fact.accepted, deadline_s=None, trained=trained)
        case _:
            return value


def _counted(value: FederatedRun, update: UpdateReceived) -> Mapping[str, float]:
    """What versions that counted skipped steps when an update came have counted."""
    if update.num_steps or SKIPPED_STEPS not in update.metrics:
        return value.trained
    num_skipped = value.trained.get(SKIPPED_STEPS, 0) + update.metrics[SKIPPED_STEPS]
    return {**value.trained, SKIPPED_STEPS: num_skipped}


def next_round(job: JobSpec, value: FederatedRun, fact: SegmentCommitted) -> FederatedRun:
    base = Base(fact.segment, fact.step, fact.digest)
    evaluation = job.evaluation
    rounds = spec_of(job).rounds
    due = evaluation is not None and (
        fact.segment % evaluation.every.count == 0 or fact.segment == rounds
    )
    evaluators = dict(value.evaluators)
    if due and evaluates_at_clients(job):
        evaluators[fact.segment] = tuple(accepted.client for accepted in value.accepted)
    return replace(
        value,
        committed=base,
        evaluators=evaluators,
        server_state=fact.server_state,
        round_num=fact.segment + 1,
        selected=(),
        assigned={},
        holders=frozenset(),
        num_unassigned=0,
        updates={},
        rejected={},
        accepted=(),
        left={},
        deaths={},
        to_evaluate=(*value.to_evaluate, base) if due else value.to_evaluate,
    )
