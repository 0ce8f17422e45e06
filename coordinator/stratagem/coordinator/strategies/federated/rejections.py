"""Describe the rejections of federated clients' updates, and map exceptions and process deaths to
their causes.

A client that fails is rejected alone, with a cause and a reason; the round continues without it.
closing.py decides what becomes of a round that has too few updates left.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from stratagem.common.base.ids import Party, WorkerId
from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.courses import Deaths, after, why
from stratagem.coordinator.core.facts import (
    ErrorRecord,
    Member,
    MembersFormed,
    ProcessDied,
    RunFailed,
    UpdateRejected,
)
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.strategy_contract import RejectedClient
from stratagem.coordinator.strategies.federated.run import Federation, spec_of, task_of

# ---- Rejected updates ----

FAIL: Final = "fail"
MAX_REASON_CHARS: Final = 300
MAX_NAMED: Final = 8
"""The most clients that a sentence names one by one."""

_VERBS: Final = {
    Cause.EXCEPTION: "raised",
    Cause.CRASHED: "crashed:",
    Cause.MEMORY: "ran out of memory:",
    Cause.TIMEOUT: "timed out:",
    Cause.REFUSED_BY_SITE: "refused:",
    Cause.OUTSIDE_WINDOW: "closed:",
    Cause.BUDGET: "refused:",
    Cause.KEYS_LOST: "lost keys:",
    Cause.ABSENT: "absent:",
    Cause.NOT_FINITE: "not finite:",
    Cause.NOT_FINITE_LOSS: "not finite:",
}
_OUT_OF_MEMORY: Final = ("MemoryError", "OutOfMemoryError")
_NO_MEMORY_LEFT: Final = ("DefaultCPUAllocator", "out of memory")
"""Words in torch's messages about memory, whose exceptions have no type of their own."""
_NOT_ALLOWED: Final = ("is not allowed on this worker", "which this worker does not allow")
"""Words of a worker's message about an entry point that its `--allow` does not have."""

_BY_THE_SITE: Final = {
    "RefusedBySiteError": Cause.REFUSED_BY_SITE,
    "SiteClosedError": Cause.OUTSIDE_WINDOW,
    "BudgetSpentError": Cause.BUDGET,
    "KeysLostError": Cause.KEYS_LOST,
}
"""The causes of refusals by a site, keyed by the type of the site's error."""


def cause_of(error: ErrorRecord) -> Cause:
    """Return the category of an exception; an error without a traceback comes from a worker."""
    kind = error.type.rpartition(".")[2]
    if kind.endswith(_OUT_OF_MEMORY):
        return Cause.MEMORY
    if kind == "RuntimeError" and any(words in error.message for words in _NO_MEMORY_LEFT):
        return Cause.MEMORY
    if kind == "TimeoutError":
        return Cause.TIMEOUT
    if not error.traceback and kind == "FloatingPointError":
        return Cause.NOT_FINITE_LOSS
    if not error.traceback and kind in _BY_THE_SITE:
        return _BY_THE_SITE[kind]
    if not error.traceback and any(words in error.message for words in _NOT_ALLOWED):
        return Cause.REFUSED_BY_SITE
    return Cause.EXCEPTION


def reason_of(error: ErrorRecord) -> str:
    """Return an error's type and message in one line; the message alone if nothing was raised."""
    text = f"{error.type}: {error.message}" if error.traceback else error.message
    line = " ".join(text.split())
    return line if len(line) <= MAX_REASON_CHARS else f"{line[: MAX_REASON_CHARS - 1]}…"


def rejection(
    value: Federation, client: int, cause: Cause, reason: str, error: ErrorRecord | None = None
) -> UpdateRejected:
    """Return the fact that rejects the update of this client of the open round."""
    return UpdateRejected(
        party=value.party,
        round_num=value.round_num,
        client=client,
        reason=reason,
        cause=cause,
        error=error,
    )


def forbidden(job: JobSpec, value: Federation) -> RunFailed | None:
    """Return the run's failure after a client has failed, if the job allows none to; else None."""
    rejected = value.clients.rejected
    if spec_of(job).options.on_client_error != FAIL or not rejected:
        return None
    client = min(rejected)
    fact = rejected[client]
    who = names(job, value, [client])
    return RunFailed(reason=f"round {value.round_num}: {who}: {fact.reason}", error=fact.error)


def said(job: JobSpec, value: Federation) -> str:
    """Return text about the open round's rejections, as "client 0: not finite; clients 1, 3:
    KeyError: 'label'"."""
    return "; ".join(f"{names(job, value, who)}: {text}" for (_, text), who in _groups(value))


def commonest_first(job: JobSpec, value: Federation) -> str:
    """Return text about the rejections, the most frequent first, as "3 raised KeyError: 'label'
    (clients 0, 2, 3); 1 not finite: ... (client 1)"."""
    return "; ".join(
        f"{len(who)} {_VERBS.get(cause, 'rejected:')} {reason} ({names(job, value, who)})"
        for (cause, reason), who in _by_number(value)
    )


def commonest_error(value: Federation) -> ErrorRecord | None:
    """Return the exception of the most frequent rejection that has one; None if none has."""
    for _, who in _by_number(value):
        for client in who:
            if (error := value.clients.rejected[client].error) is not None:
                return error
    return None


def names(job: JobSpec, value: Federation, clients: list[int]) -> str:
    """Return client names, as "clients 0, 2"; with workers if each worker has its own rows."""
    has_homes = job.data.worker_local is not None
    numbers = [
        f"{client} ({value.roster[client].worker_id})" if has_homes else str(client)
        for client in clients[:MAX_NAMED]
    ]
    more = f" and {len(clients) - MAX_NAMED} more" if len(clients) > MAX_NAMED else ""
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(numbers)}{more}"


def at_workers(value: Federation, clients: Iterable[int]) -> str:
    """Return the names of clients with their workers, as "client 0 (a), client 2 (c)"."""
    return ", ".join(f"client {c} ({value.roster[c].worker_id})" for c in clients)


Group = tuple[tuple[Cause, str], list[int]]


def _groups(value: Federation) -> list[Group]:
    """Return the rejected clients, grouped by cause and reason, in order of first clients."""
    groups: dict[tuple[Cause, str], list[int]] = defaultdict(list)
    for client, fact in sorted(value.clients.rejected.items()):
        groups[fact.cause, fact.reason].append(client)
    return list(groups.items())


def _by_number(value: Federation) -> list[Group]:
    return sorted(_groups(value), key=lambda group: -len(group[1]))


def in_closed_rounds(value: Federation) -> tuple[RejectedClient, ...]:
    """Return the clients whose updates were rejected in closed rounds, sorted by client."""
    return tuple(
        RejectedClient(client, value.roster[client].worker_id, count, reason)
        for client, (count, reason) in sorted(value.rejections.items())
    )


def together(rejected: Iterable[RejectedClient]) -> tuple[RejectedClient, ...]:
    """Merge rejections of the same client: return one entry per client, with the sum of its rounds
    and its newest reason."""
    merged: dict[int, RejectedClient] = {}
    for refused in rejected:
        before = merged[refused.client].num_rounds if refused.client in merged else 0
        merged[refused.client] = replace(refused, num_rounds=before + refused.num_rounds)
    return tuple(merged.values())


def in_all(job: JobSpec, rejected: Iterable[RejectedClient]) -> str:
    """Return text about the rejected clients of the whole run, for its last sentence; "" if there
    were none."""
    order = sorted(together(rejected), key=lambda client: (-client.num_rounds, client.client))
    has_homes = job.data.worker_local is not None
    parts = [
        f"client {client.client}{f' ({client.worker_id})' if has_homes else ''} in "
        f"{counted(client.num_rounds, 'round')} ({client.reason})"
        for client in order
    ]
    return f"rejected: {'; '.join(few(parts))}" if parts else ""


def few(texts: list[str], more: str = "more") -> list[str]:
    """Return the first few texts and, if there are more, a text with the number of the others."""
    num_more = len(texts) - MAX_NAMED
    return [*texts[:MAX_NAMED], f"{num_more} {more}"] if num_more > 0 else texts


# ---- Process deaths ----
#
# The end of a worker process is attributed to the work of a federated run that it counts against.
#
# A build, or an evaluation by one worker for all, that ends process after process fails the run.
# A client that does so, or one that evaluates on its own rows, is left out alone.

BUILD: Final = "the build"
EVALUATION: Final = "the evaluation"


def too_deadly(value: Federation) -> RunFailed | None:
    """Return the run's failure if its build or evaluation kills process after process, or None."""
    deadly = {
        task: d for task in (BUILD, EVALUATION) if (d := value.losses.hopeless(task)) is not None
    }
    if not deadly:
        return None
    work = why(", ".join(deadly), next(iter(deadly.values())))
    return RunFailed(reason=f"round {value.round_num}: {work}")


def crashed(value: Federation) -> UpdateRejected | None:
    """Return the rejection of a client whose training kills process after process; else None."""
    for client in value.unanswered():
        if (deaths := value.losses.hopeless(task_of(client))) is not None:
            return rejection(value, client, Cause.CRASHED, why("it", deaths))
    return None


def with_death(value: Federation, died: ProcessDied, now_s: float) -> Federation:
    """Return the run value with a death counted against the worker's task, or all if unknown."""
    member, losses, assigned = died.member, value.losses, value.clients.assigned
    tasks = set(losses.taken.get(member, ()))
    if member in value.helper and (value.committed is None or value.evaluations):
        tasks.add(task_of_helper(value, member))
    for client in value.unanswered():
        if client in assigned and assigned[client][0] == member:
            tasks.add(task_of(client))
    if died.at is not None:
        tasks &= {_task_at(value, died.at, member)}
    new = {task: after(losses.deaths.get(task, Deaths()), died, now_s, ()) for task in tasks}
    return replace(value, losses=replace(losses, deaths={**losses.deaths, **new}))


def task_of_helper(value: Federation, member: Member) -> str:
    """Return the key of a worker's deaths in the task that it has as helper: build or evaluate."""
    if value.committed is None:
        return BUILD
    are_clients = any(owed.clients is not None for owed in value.evaluations.values())
    return task_of_evaluator(member.worker_id) if are_clients else EVALUATION


def task_of_evaluator(worker_id: WorkerId) -> str:
    """Return the key of a client's deaths in its task to evaluate a state on its own rows."""
    return f"{EVALUATION} on {worker_id}"


def _task_at(value: Federation, at: Party, member: Member) -> str:
    """Return the task on which a process died, from the path of the party whose plan it executed;
    the path ends in "client<n>", "evaluate" or "build"."""
    name = at.rpartition("/")[2]
    client = name.removeprefix("client")
    return task_of(int(client)) if client.isdecimal() else task_of_helper(value, member)


def with_helper(value: Federation, fact: MembersFormed) -> Federation:
    """Return the run value with another helper, noting the task taken from the previous one."""
    losses = value.losses
    for member in value.helper:
        if member not in fact.members and (value.committed is None or value.evaluations):
            losses = losses.with_taken(member, task_of_helper(value, member))
    return replace(
        value,
        membership=fact.membership,
        helper=fact.members,
        fingerprint=fact.fingerprint,
        losses=losses,
    )
