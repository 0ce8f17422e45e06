"""Command in, facts or a refusal out.

decide answers the command itself; settle then asks every active run's strategy what follows from
how things stand now, one fact at a time, until nobody has anything to add. Both only read.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from stratagem.common.errors import InvalidInputError
from stratagem.common.ids import Party, RunId, WorkerId
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.apply import CLUSTER, apply
from stratagem.coordinator.core.commands import (
    CancelRun,
    Command,
    DeleteRun,
    DrainWorker,
    Entry,
    LoseWorker,
    Refusal,
    RefusalKind,
    RegisterWorker,
    Report,
    ReportTrouble,
    ResumeRun,
    SubmitRun,
    Tick,
)
from stratagem.coordinator.core.facts import (
    ROOT,
    Fact,
    Member,
    MembersFormed,
    PartyFailed,
    RunCancelled,
    RunDeleted,
    RunFailed,
    RunReleased,
    RunResumed,
    RunSubmitted,
    UpdateReceived,
    UpdateRejected,
    WorkerDraining,
    WorkerLost,
    WorkerRegistered,
)
from stratagem.coordinator.core.state import CoordinatorState, RunPhase, RunRecord, World
from stratagem.coordinator.strategies.contract import PartyView
from stratagem.coordinator.strategies.table import require, strategy_of

MAX_DECISIONS = 10_000
"""A strategy that has more than this to add to one command decides in a circle."""


def decide(state: CoordinatorState, command: Command) -> tuple[Entry, ...] | Refusal:
    """The facts that a command leads to by itself, or why it changes nothing."""
    match command:
        case SubmitRun():
            return _submit(state, command)
        case CancelRun():
            return _cancel(state, command)
        case ResumeRun():
            return _resume(state, command)
        case DeleteRun():
            return _delete(state, command)
        case RegisterWorker():
            return _register(state, command)
        case LoseWorker():
            return _lose(state, command)
        case DrainWorker():
            return _drain(state, command)
        case Report():
            return _report(state, command)
        case ReportTrouble():
            return _trouble(state, command)
        case Tick():
            return ()


def settle(state: CoordinatorState, now_s: float) -> Iterator[Entry]:
    """Facts that follow from the state; each is applied before the next is asked for."""
    for _ in range(MAX_DECISIONS):
        entry = next(_decisions(state, now_s), None)
        if entry is None:
            return
        yield entry
        state = apply(state, entry.run_id, entry.fact, now_s)
    raise RuntimeError(f"decisions do not settle; the last one was {entry}")


def world_of(state: CoordinatorState) -> World:
    """What strategies may look at."""
    load = Counter[WorkerId]()
    now = {record.member for record in state.workers.values()}
    for run in state.runs.values():
        if run.ended is None:
            # Earlier starts of a worker burden nobody.
            load.update({member.worker_id for member in run.touched & now})
    return World(state.workers, load)


def _decisions(state: CoordinatorState, now_s: float) -> Iterator[Entry]:
    world = world_of(state)
    for run_id, run in state.runs.items():
        if run.ended is not None:
            continue
        fact = ask(run, world, now_s)
        if fact is not None:
            yield Entry(run_id, fact, key_of(fact))


def ask(run: RunRecord, world: World, now_s: float) -> Fact | None:
    """What follows for a run. A strategy that raises fails its own run, never the coordinator."""
    try:
        fact = strategy_of(run.job).decide(run.job, run.value, world, now_s)
    except Exception as error:  # the border to plug-ins
        return RunFailed(reason=f"the strategy raised {type(error).__name__}: {error}")
    return fact or _given_up(run, world, now_s)


def deadline_of(run: RunRecord, world: World) -> float | None:
    """Leader-clock time at which an active run has to be asked again."""
    try:
        deadline_s = strategy_of(run.job).next_deadline(run.value)
    except Exception:  # the border to plug-ins; what it decides next fails the run
        return None
    limit_s = run.job.placement_timeout_s
    if limit_s is None or not why_waiting(run, world):
        return deadline_s
    return min(run.changed_s + limit_s, math.inf if deadline_s is None else deadline_s)


def why_waiting(run: RunRecord, world: World) -> str:
    """What a run without any worker waits for, as a sentence; "" for one that has some."""
    try:
        outlook = strategy_of(run.job).outlook(run.job, run.value, world)
    except Exception:  # the border to plug-ins; what a run waits for is not worth its end
        return ""
    is_waiting = outlook.phase in (RunPhase.PLACING, RunPhase.RECOVERING) and not outlook.members
    return outlook.reason if is_waiting else ""


def _given_up(run: RunRecord, world: World, now_s: float) -> RunFailed | None:
    """Nothing happens to a run that waits, so it has waited since its newest fact."""
    limit_s = run.job.placement_timeout_s
    if limit_s is None or now_s < run.changed_s + limit_s:
        return None
    reason = why_waiting(run, world)
    return RunFailed(reason=f"without workers for {limit_s:g} s: {reason}") if reason else None


def key_of(fact: Fact) -> str | None:
    """Idempotency keys of facts that must not happen twice."""
    match fact:
        case MembersFormed():
            return f"members/{fact.party}/{fact.membership}"
        case UpdateReceived() | UpdateRejected():
            return f"update/{fact.party}/{fact.round_num}/{fact.client}"
        case RunSubmitted():
            return "submitted"
        case _:
            return None


def _refuse(kind: RefusalKind, reason: str) -> Refusal:
    return Refusal(kind, reason)


def _unknown(run_id: RunId) -> Refusal:
    return _refuse(RefusalKind.NOT_FOUND, f"run {run_id!r} is not known")


def _submit(state: CoordinatorState, command: SubmitRun) -> tuple[Entry, ...] | Refusal:
    job = JobSpec.from_json(command.job_json)
    known = state.runs.get(command.run_id)
    if known is not None:
        if known.job == job:
            return ()
        return _refuse(RefusalKind.CONFLICT, f"run {command.run_id!r} exists with another job")
    violations = require(job).check(job)
    if violations:
        raise InvalidInputError(violations=violations)
    fact = RunSubmitted(
        job_json=command.job_json,
        wall_s=command.wall_s,
        by=command.by,
        traceparent=command.traceparent,
    )
    return (Entry(command.run_id, fact, key_of(fact)),)


def _cancel(state: CoordinatorState, command: CancelRun) -> tuple[Entry, ...] | Refusal:
    run = state.runs.get(command.run_id)
    if run is None:
        return _unknown(command.run_id)
    if run.ended is not None:
        return ()
    kept = f"commit {run.commits[-1].segment} is kept" if run.commits else "nothing was committed"
    fact = RunCancelled(reason=f"stopped by {command.by or 'request'}; {kept}", by=command.by)
    return (Entry(command.run_id, fact),)


def _resume(state: CoordinatorState, command: ResumeRun) -> tuple[Entry, ...] | Refusal:
    run = state.runs.get(command.run_id)
    if run is None:
        return _unknown(command.run_id)
    if run.ended not in (RunPhase.CANCELLED, RunPhase.FAILED):
        what = "is active" if run.ended is None else "is completed"
        return _refuse(RefusalKind.PRECONDITION, f"run {command.run_id!r} {what}")
    if not run.is_released:
        reason = f"run {command.run_id!r} is still being stopped; try again in a moment"
        return _refuse(RefusalKind.NOT_YET, reason)
    return (Entry(command.run_id, RunResumed(by=command.by)),)


def _delete(state: CoordinatorState, command: DeleteRun) -> tuple[Entry, ...] | Refusal:
    run = state.runs.get(command.run_id)
    if run is None:
        return _unknown(command.run_id)
    if run.ended is None:
        return _refuse(RefusalKind.PRECONDITION, f"run {command.run_id!r} is active; stop it first")
    if not run.is_released:
        reason = f"run {command.run_id!r} is still being stopped; try again in a moment"
        return _refuse(RefusalKind.NOT_YET, reason)
    return (Entry(command.run_id, RunDeleted(by=command.by)),)


def _register(state: CoordinatorState, command: RegisterWorker) -> tuple[Entry, ...]:
    known = state.workers.get(command.member.worker_id)
    fact = WorkerRegistered(
        member=command.member, address=command.address, capability=command.capability
    )
    if known is None:
        return (Entry(CLUSTER, fact),)
    same = (known.member, known.address, known.capability) == (
        command.member,
        command.address,
        command.capability,
    )
    if same and known.is_usable:
        return ()
    is_new = known.member != command.member
    has_ended = is_new and not known.is_draining and not known.is_blameless
    deaths = _deaths(state, known.member) if has_ended else ()
    return (*deaths, Entry(CLUSTER, fact))


def _deaths(state: CoordinatorState, member: Member) -> tuple[Entry, ...]:
    """The process of a member has ended unasked: which segments was it working on?"""
    entries: list[Entry] = []
    for run_id, run in state.runs.items():
        if run.ended is None and member in run.touched:
            found = strategy_of(run.job).deaths(run.value, member)
            entries += [Entry(run_id, fact) for fact in found]
    return tuple(entries)


def _lose(state: CoordinatorState, command: LoseWorker) -> tuple[Entry, ...]:
    known = state.workers.get(command.member.worker_id)
    if known is None or known.member != command.member or not known.is_alive:
        return ()
    fact = WorkerLost(
        member=command.member, reason=command.reason, is_blameless=command.is_blameless
    )
    return (Entry(CLUSTER, fact),)


def _drain(state: CoordinatorState, command: DrainWorker) -> tuple[Entry, ...]:
    known = state.workers.get(command.member.worker_id)
    if known is None or known.member != command.member or known.is_draining:
        return ()
    return (Entry(CLUSTER, WorkerDraining(member=command.member)),)


def _report(state: CoordinatorState, command: Report) -> tuple[Entry, ...] | Refusal:
    run = state.runs.get(command.run_id)
    if run is None:
        return _unknown(command.run_id)
    if isinstance(command.fact, RunReleased):
        return () if run.is_released else (Entry(command.run_id, command.fact),)
    if run.ended is not None:
        return _refuse(RefusalKind.STALE, f"run {command.run_id!r} has ended")
    if isinstance(command.fact, RunFailed):
        return (Entry(command.run_id, command.fact),)
    if isinstance(command.fact, PartyFailed) and command.fact.party == ROOT:
        failed = RunFailed(reason=command.fact.reason, error=command.fact.error)
        return (Entry(command.run_id, failed),)
    reason = strategy_of(run.job).is_welcome(run.job, run.value, command.fact)
    if reason:
        return _refuse(RefusalKind.STALE, reason)
    return (Entry(command.run_id, command.fact, key_of(command.fact)),)


def _trouble(state: CoordinatorState, command: ReportTrouble) -> tuple[Entry, ...] | Refusal:
    run = state.runs.get(command.run_id)
    if run is None:
        return _unknown(command.run_id)
    found = parties_of(run).get(command.party)
    if found is None or found.membership != command.membership or not found.members:
        return ()
    fact = strategy_of(run.job).reform(run.value, command.party, command.reason)
    return () if fact is None else (Entry(command.run_id, fact, key_of(fact)),)


def parties_of(run: RunRecord) -> Mapping[Party, PartyView]:
    """The parties of a run whose members exchange tensors among themselves."""
    return {} if run.ended is not None else strategy_of(run.job).parties(run.value)
