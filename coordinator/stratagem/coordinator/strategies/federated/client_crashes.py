"""Attribution of the end of a worker process to the work of a federated run that it counts against.

A build, or an evaluation by one worker for all, that ends process after process fails the run; a
client that does so, or one that evaluates on its own rows, is left out alone.
"""

from dataclasses import replace
from typing import Final

from stratagem.common.base.ids import Party, WorkerId
from stratagem.coordinator.core.crash_loops import Deaths, after, why
from stratagem.coordinator.core.facts import (
    Member,
    MembersFormed,
    ProcessDied,
    RunFailed,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.strategies.federated.federated_run import FederatedRun, task_of
from stratagem.coordinator.strategies.federated.update_rejections import rejection

BUILD: Final = "the build"
EVALUATION: Final = "the evaluation"


def too_deadly(value: FederatedRun) -> RunFailed | None:
    """Fail the run when its build or its evaluation ends every process that tries it."""
    deaths = {task: value.deaths[task] for task in (BUILD, EVALUATION) if task in value.deaths}
    deadly = [task for task in deaths if deaths[task].are_too_many]
    if not deadly:
        return None
    work = why(", ".join(deadly), value.deaths[deadly[0]])
    return RunFailed(reason=f"round {value.round_num}: {work}")


def crashed(value: FederatedRun) -> UpdateRejected | None:
    """Reject the first client of the open round that ends every process which trains it."""
    for client in value.unanswered():
        deaths = value.deaths.get(task_of(client))
        if deaths is not None and deaths.are_too_many:
            return rejection(value, client, Cause.CRASHED, why("it", deaths))
    return None


def with_death(value: FederatedRun, died: ProcessDied, now_s: float) -> FederatedRun:
    """Count a worker process that ended against what it did, or against all that it had to do."""
    member, tasks = died.member, set(value.left.get(died.member, ()))
    if member in value.helper and (value.committed is None or value.to_evaluate):
        tasks.add(task_of_helper(value, member))
    for client in value.unanswered():
        if client in value.assigned and value.assigned[client][0] == member:
            tasks.add(task_of(client))
    if died.at is not None:
        tasks &= {_task_at(value, died.at, member)}
    deaths = {task: after(value.deaths.get(task, Deaths()), died, now_s, ()) for task in tasks}
    return replace(value, deaths={**value.deaths, **deaths})


def task_of_helper(value: FederatedRun, member: Member) -> str:
    """Return the task of a worker that builds or evaluates, as the key of its deaths."""
    if value.committed is None:
        return BUILD
    return task_of_evaluator(member.worker_id) if value.evaluators else EVALUATION


def task_of_evaluator(worker_id: WorkerId) -> str:
    """Return the task of a client that evaluates on its own rows, as the key of its deaths."""
    return f"{EVALUATION} on {worker_id}"


def _task_at(value: FederatedRun, at: Party, member: Member) -> str:
    """Return the task of the party whose plan the process executed; the party's path ends in
    "client<n>", "evaluate" or "build"."""
    name = at.rpartition("/")[2]
    client = name.removeprefix("client")
    return task_of(int(client)) if client.isdecimal() else task_of_helper(value, member)


def with_helper(value: FederatedRun, fact: MembersFormed) -> FederatedRun:
    """Note that another worker builds and evaluates, and what was taken from the one before."""
    left = dict(value.left)
    for member in value.helper:
        if member not in fact.members and (value.committed is None or value.to_evaluate):
            left[member] = (*left.get(member, ()), task_of_helper(value, member))
    return replace(
        value,
        membership=fact.membership,
        helper=fact.members,
        fingerprint=fact.fingerprint,
        left=left,
    )
