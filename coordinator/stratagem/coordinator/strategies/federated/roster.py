"""Manage open rosters, in which clients join, leave and come back while a federation goes on.

A client is a worker by its name; its number is the order in which it first joined. Clients join
when a round opens, or while a round has too few updates. A client that is lost in a round is
waited for; one whose worker was stopped, or is outside its window, is not.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from stratagem.common.base.ids import WorkerId
from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec
from stratagem.common.strategy import ByCapability, Roster
from stratagem.coordinator.core.facts import (
    ClientBinding,
    ClientEvaluated,
    ClientLeft,
    ClientsAssigned,
    ClientsJoined,
    ClientsSelected,
    Excused,
    Fact,
    RoundWaits,
    RunFailed,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.world import WorkerRecord, World
from stratagem.coordinator.strategies.federated.decisions import (
    excused_by_bench,
    open_round,
    select,
)
from stratagem.coordinator.strategies.federated.rejections import MAX_NAMED, at_workers, few
from stratagem.coordinator.strategies.federated.run import (
    Departure,
    Federation,
    Open,
    reassigned,
    spec_of,
    with_clients,
    without,
)

MAX_JOINS: Final = 1000
"""The most clients that join with one fact."""
ASK_AGAIN_S: Final = 300.0
"""Seconds until a client whose site is closed is asked again, if the site has not said when it
opens: a round that waits overnight leaves about a hundred facts per client."""
AWAY: Final = "away"
STOPPED: Final = "its worker was stopped"

Here = Mapping[WorkerId, WorkerRecord]


def roster_of(job: JobSpec) -> Roster | None:
    """Return the settings of the job's open roster; None if the roster is fixed."""
    return spec_of(job).options.open_roster


def by_name(workers: Iterable[WorkerRecord]) -> Here:
    return {worker.member.worker_id: worker for worker in workers}


# ---- Decisions ----


def before_build(
    job: JobSpec, value: Federation, workers: list[WorkerRecord], now_s: float
) -> tuple[bool, Fact | None]:
    """Return True if enough clients are here to build the model, else False; and the fact that
    makes the run wait for more, if any."""
    roster = roster_of(job)
    assert roster is not None
    num_here = _num_fitting(job, workers)
    if num_here >= roster.min_clients:
        return True, None
    return False, wait(job, value, _count(job, num_here), now_s)


def next_round(
    job: JobSpec, value: Federation, world: World, workers: list[WorkerRecord], now_s: float
) -> Fact | None:
    """Return the next fact before a round opens: a client leaves, clients join, the round opens, or
    the run waits for enough clients."""
    here = by_name(workers)
    if fact := _gone(value, world) or joined(job, value, here, now_s):
        return fact
    able = able_clients(value, here)
    opened = open_round(job, value, able, excused(value, world, here), now_s)
    roster = roster_of(job)
    assert roster is not None
    if len(able) >= roster.min_clients and isinstance(opened, ClientsSelected):
        return opened
    return wait(job, value, lack(job, value, world, workers), now_s)


def lack(job: JobSpec, value: Federation, world: World, workers: list[WorkerRecord]) -> str:
    """Return a sentence that says how many clients can take part in a round, and why not others."""
    if value.committed is None:
        return _count(job, _num_fitting(job, workers))
    here = by_name(workers)
    able = able_clients(value, here)
    text = f"round {value.round_num}: {_count(job, len(able))}"
    if able and not select(spec_of(job).client_selection, able, job.seed, value.round_num):
        text += ", none with the tags that are required"
    excuses = excused(value, world, here)
    others = [f"{excuse.reason}: {_named(value, excuse.clients)}" for excuse in excuses]
    return "; ".join([text, *others, *closed_sites(value)])


def closed_sites(value: Federation) -> list[str]:
    """Return the messages of some sites that take no part now, but not of rejected clients, whose
    reasons are in the round's report."""
    reasons = {
        departure.reason: client
        for client, departure in sorted(value.attendance.left.items())
        if departure.asked_again_s is not None and client not in value.clients.rejected
    }
    return few([f"{text} (client {client})" for text, client in reasons.items()], "more closed")


def wait(
    job: JobSpec, value: Federation, reason: str, now_s: float, num_needed: int | None = None
) -> RoundWaits | ClientLeft | RunFailed | None:
    """Return the fact with which a run that has too few clients begins to wait or, once the
    roster's patience has ended, fails; None while it waits."""
    roster, until_s = roster_of(job), value.attendance.waits_until_s
    assert roster is not None
    if until_s is None:
        return RoundWaits(
            party=value.party,
            round_num=value.round_num,
            reason=reason,
            num_needed=num_needed,
            until_s=now_s + roster.wait_s,
        )
    for client, departure in sorted(value.attendance.left.items()):
        if departure.asked_again_s is not None and now_s >= departure.asked_again_s:
            return _left(value, client, AWAY)  # its worker has gone since it has refused
    if now_s < until_s:
        return None
    return RunFailed(reason=f"{reason}; waited {roster.wait_s:g} s for more")


def departed(job: JobSpec, value: Federation, world: World, now_s: float) -> Fact | None:
    """Return the fact that a client which was waited for has left, or that an evaluation no longer
    waits for a client that has left; None if there is neither."""
    roster = roster_of(job)
    if roster is None:
        return None
    awaited = set(_expected(value))
    for client, until_s in sorted(value.attendance.awaited_until_s.items()):
        if client not in awaited:
            continue
        record = world.workers.get(value.roster[client].worker_id)
        if why := _why_stopped(record):
            return _left(value, client, why)
        if now_s >= until_s:
            return _left(value, client, f"{AWAY} for {roster.wait_s:g} s")
    for segment, owed in value.evaluations.items():
        for client in owed.left:
            if (departure := value.attendance.left.get(client)) is not None:
                return ClientEvaluated(
                    party=value.party,
                    segment=segment,
                    client=client,
                    sums={},
                    reason=f"it has left: {departure.reason}",
                    has_left=True,
                )
    return None


def joined(job: JobSpec, value: Federation, here: Here, now_s: float) -> ClientsJoined | None:
    """Return the fact that clients join: those that are back, sorted by number, and new ones,
    sorted by name; None if there are none."""
    names_before = {binding.worker_id for binding in value.roster}
    departures = value.attendance.left
    names = {client: value.roster[client].worker_id for client in sorted(departures)}
    back = [c for c, name in names.items() if _is_back(departures[c], here.get(name), now_s)]
    room = spec_of(job).num_clients - len(value.roster)
    new = sorted(here.keys() - names_before)[:room] if room > 0 else []
    clients = [(client, value.roster[client].worker_id) for client in back]
    clients += enumerate(new, start=len(value.roster))
    if not clients:
        return None
    bindings = tuple(
        ClientBinding(client=client, worker_id=name, tags=here[name].capability.tags)
        for client, name in clients[:MAX_JOINS]
    )
    return ClientsJoined(party=value.party, clients=bindings)


def goes_on(job: JobSpec, value: Federation) -> bool:
    """Return True if a round with too few updates continues with other clients: some have left it,
    or the job says that it waits."""
    if roster_of(job) is None:
        return False
    return bool(value.left_unanswered()) or spec_of(job).options.on_missing_quorum == "wait"


def more(
    job: JobSpec, value: Federation, workers: list[WorkerRecord], now_s: float
) -> ClientsJoined | ClientsSelected | None:
    """Return the fact that brings further clients into a round with too few updates: some that
    join, else some that were not asked yet; None if there are none."""
    here = by_name(workers)
    if new := joined(job, value, here, now_s):
        return new
    asked = set(value.clients.selected)
    fresh = [binding for binding in able_clients(value, here) if binding.client not in asked]
    opened = open_round(job, value, fresh, value.clients.excused, now_s)
    if not isinstance(opened, ClientsSelected):
        return None
    clients = tuple(sorted((asked - value.left_unanswered()) | set(opened.clients)))
    return opened.model_copy(update={"clients": clients, "num_needed": value.clients.num_needed})


def able_clients(value: Federation, here: Here) -> list[ClientBinding]:
    """Return the clients of the roster that can take part in the next round."""
    attendance, number = value.attendance, value.round_num
    return [
        binding
        for binding in value.roster
        if binding.worker_id in here and attendance.is_able(binding.client, number)
    ]


def excused(value: Federation, world: World, here: Here) -> tuple[Excused, ...]:
    """Return the clients that cannot be asked, by reason, without those that have left."""
    away: dict[str, list[int]] = {}
    benched = excused_by_bench(value)
    sitting = {client for excuse in benched for client in excuse.clients}
    for binding in value.roster:
        client = binding.client
        if binding.worker_id in here or client in value.attendance.left or client in sitting:
            continue
        reason = _why_stopped(world.workers.get(binding.worker_id)) or AWAY
        away.setdefault(reason, []).append(client)
    absent = (Excused(reason=reason, clients=tuple(who)) for reason, who in sorted(away.items()))
    return (*absent, *benched)


def deadline(value: Federation) -> float | None:
    """Return the leader-clock time at which the wait ends: a client that is waited for counts as
    gone, or the run fails for lack of clients; None if nothing is waited for."""
    attendance = value.attendance
    is_training = next(value.unanswered(), None) is not None
    times = []
    if attendance.waits_until_s is not None and not is_training:
        times.append(attendance.waits_until_s)
        again = (departure.asked_again_s for departure in attendance.left.values())
        times += [time for time in again if time is not None]
    if attendance.awaited_until_s:
        expected = set(_expected(value))
        times += [until for c, until in attendance.awaited_until_s.items() if c in expected]
    return min(times, default=None)


# ---- Folds ----


def with_joined(job: JobSpec, value: Federation, fact: ClientsJoined, now_s: float) -> Federation:
    """Return the run value with clients added to the roster, or back in it."""
    roster, numbers = list(value.roster), [binding.client for binding in fact.clients]
    for binding in fact.clients:
        if binding.client < len(roster):
            roster[binding.client] = binding
        else:
            roster.append(binding)
    departures = without(value.attendance.left, numbers)
    attendance = replace(value.attendance, left=departures, waits_until_s=None)
    value = replace(value, roster=tuple(roster), attendance=attendance)
    return awaiting_all(job, reassigned(value, value.clients), now_s)


def with_left(
    value: Federation,
    client: int,
    reason: str,
    now_s: float,
    asked_again_s: float | None = None,
) -> Federation:
    """Return the run value after a client left; asked_again_s: when to ask it again."""
    departure = Departure(reason, asked_again_s, since_s=now_s)
    departures = {**value.attendance.left, client: departure}
    attendance = replace(value.attendance.here([client]), left=departures)
    clients = replace(value.clients, assigned=without(value.clients.assigned, [client]))
    return reassigned(replace(value, attendance=attendance), clients)


def is_refusal(job: JobSpec, fact: UpdateRejected) -> bool:
    """Return True if a client of an open roster answers that it takes no part at this time."""
    return fact.cause is Cause.OUTSIDE_WINDOW and roster_of(job) is not None


def asking_again(value: Federation, now_s: float) -> Federation:
    """Return the run value with the time at which the waiting round asks the refusing sites again:
    when the first site opens, if sites say when."""
    clients = value.clients
    refused = [fact for fact in clients.rejected.values() if fact.cause.is_refusal]
    again_s = None
    if clients.is_waiting and refused:
        again_s = now_s + min(fact.opens_in_s or ASK_AGAIN_S for fact in refused)
    return with_clients(value, replace(clients, asks_again_s=again_s))


def awaiting_all(job: JobSpec, value: Federation, now_s: float) -> Federation:
    """Return the run value in which the open round's clients without a worker are waited for."""
    roster = roster_of(job)
    clients = value.clients
    if roster is None or not clients.num_unassigned:
        return value
    waiting = [client for client in value.unanswered() if client not in clients.assigned]
    attendance = value.attendance.awaiting(waiting, now_s + roster.wait_s)
    return replace(value, attendance=attendance)


def after_assignment(
    job: JobSpec, value: Federation, fact: ClientsAssigned, now_s: float
) -> Federation:
    """Return the run value in which clients without a worker are waited for, and no others."""
    if roster_of(job) is None:
        return value
    placed = [a.client for a in fact.assignments if a.member is not None]
    value = replace(value, attendance=value.attendance.here(placed))
    return awaiting_all(job, value, now_s)


def awaiting_evaluators(job: JobSpec, value: Federation, now_s: float) -> Federation:
    """Return the run value in which absent clients that have yet to evaluate are waited for."""
    roster = roster_of(job)
    if roster is None:
        return value
    if value.committed is None:  # enough are here for the model to be built
        return replace(value, attendance=replace(value.attendance, waits_until_s=None))
    here = {member.worker_id for member in value.helper}
    expected = set(_evaluators(value))
    present = {client for client in expected if value.roster[client].worker_id in here}
    attendance = value.attendance.here(present - set(value.unanswered()))
    attendance = attendance.awaiting(expected - present, now_s + roster.wait_s)
    return replace(value, attendance=attendance)


# ---- Helpers ----


def _expected(value: Federation) -> Iterator[int]:
    """Yield the clients from which an update or an evaluation is expected."""
    if isinstance(value.round, Open):
        yield from value.unanswered()
    yield from _evaluators(value)


def _evaluators(value: Federation) -> Iterator[int]:
    for owed in value.evaluations.values():
        yield from owed.left


def _gone(value: Federation, world: World) -> ClientLeft | None:
    """Return the fact that a client has left with its worker; None if all workers are known."""
    for binding in value.roster:
        record = world.workers.get(binding.worker_id)
        is_gone = record is None or record.has_left
        if is_gone and binding.client not in value.attendance.left:
            return _left(value, binding.client, _why_stopped(record))
    return None


def _left(value: Federation, client: int, reason: str) -> ClientLeft:
    return ClientLeft(party=value.party, client=client, reason=reason)


def _is_back(departure: Departure, record: WorkerRecord | None, now_s: float) -> bool:
    if record is None:
        return False
    again_s = departure.asked_again_s
    return again_s is None or now_s >= again_s or record.registered_s > departure.since_s


def _why_stopped(record: WorkerRecord | None) -> str:
    """Return why a worker gets no work until somebody acts; "" if it may come back by itself."""
    if record is not None and record.quarantine:
        return f"its worker is quarantined: {record.quarantine}"
    if record is None or record.has_left:
        return STOPPED
    if not record.is_draining:
        return ""
    return record.reason if record.reason != "draining" else "its worker is being stopped"


def _num_fitting(job: JobSpec, workers: list[WorkerRecord]) -> int:
    selection = spec_of(job).client_selection
    required = set(selection.required_tags) if isinstance(selection, ByCapability) else set()
    return sum(required <= set(worker.capability.tags) for worker in workers)


def _count(job: JobSpec, num_able: int) -> str:
    roster = roster_of(job)
    assert roster is not None
    who = "sites" if job.data.worker_local is not None else "clients"
    return f"{num_able} of {roster.min_clients} {who}"


def _named(value: Federation, clients: tuple[int, ...]) -> str:
    text, more = at_workers(value, clients[:MAX_NAMED]), len(clients) - MAX_NAMED
    return f"{text} and {counted(more, 'other')}" if more > 0 else text
