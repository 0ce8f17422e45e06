"""What a federated round decides, in the order of the round.

Pure functions of the run value and of which workers there are; federated.py asks them.
"""

from collections import Counter
from collections.abc import Mapping
from math import ceil

from stratagem.common.ids import WorkerId
from stratagem.common.job import JobSpec
from stratagem.common.strategy import ByCapability
from stratagem.coordinator.core.facts import (
    SKIPPED_STEPS,
    Accepted,
    Assignment,
    ClientBinding,
    ClientsAssigned,
    ClientsSelected,
    Evaluated,
    Member,
    MembersFormed,
    RosterFormed,
    RoundClosed,
    RunCompleted,
    RunFailed,
)
from stratagem.coordinator.core.state import WorkerRecord
from stratagem.coordinator.strategies import late_updates
from stratagem.coordinator.strategies.client_metrics import combine
from stratagem.coordinator.strategies.deaths import why
from stratagem.coordinator.strategies.federated_run import (
    FederatedRun,
    evaluates_at_clients,
    lacking,
    spec_of,
)
from stratagem.coordinator.strategies.round_metrics import round_metrics
from stratagem.coordinator.strategies.selection import select


def too_deadly(value: FederatedRun) -> RunFailed | None:
    """Something that ends every process that tries it would go on for ever."""
    deadly = sorted(task for task, deaths in value.deaths.items() if deaths.are_too_many)
    if not deadly:
        return None
    work = why(", ".join(deadly), value.deaths[deadly[0]])
    return RunFailed(reason=f"round {value.round_num}: {work}")


def new_helper(
    job: JobSpec, value: FederatedRun, workers: list[WorkerRecord]
) -> MembersFormed | None:
    """Somebody must build at first, and evaluate later."""
    alive = {worker.member for worker in workers}
    helper = tuple(member for member in value.helper if member in alive)
    if evaluates_at_clients(job) and value.roster:
        names = {binding.worker_id for binding in value.roster}
        everybody = sorted((w.member for w in workers), key=lambda member: member.worker_id)
        helper = tuple(member for member in everybody if member.worker_id in names)
    elif not helper and workers:
        helper = (workers[0].member,)
    if helper == value.helper:
        return None
    fingerprint = value.fingerprint
    if helper and not fingerprint and job.execution.deterministic:
        fingerprint = workers[0].capability.numerics_fingerprint
    reason = f"{helper[0].worker_id} builds and evaluates" if helper else "no worker is left"
    if len(helper) > 1:
        reason = f"{len(helper)} clients evaluate"
    return MembersFormed(
        party=value.party,
        membership=value.membership + 1,
        members=helper,
        reason=reason,
        fingerprint=fingerprint,
    )


def evaluated(job: JobSpec, value: FederatedRun) -> Evaluated | None:
    """The metrics of a round that all its clients have evaluated."""
    for segment, clients in value.evaluators.items():
        sums = value.evaluations.get(segment, {})
        if job.evaluation is not None and sums.keys() == set(clients):
            metrics = combine(sums, job.evaluation.metrics)
            return Evaluated(party=value.party, segment=segment, metrics=metrics)
    return None


def form_roster(
    job: JobSpec, value: FederatedRun, workers: list[WorkerRecord]
) -> RosterFormed | None:
    """Bind every client to a worker; None while the workers that it takes are not here."""
    strategy = spec_of(job)
    by_name = sorted(workers, key=lambda worker: worker.member.worker_id)
    if job.data.worker_local is not None:
        by_name = [w for w in by_name if job.data.worker_local in w.capability.local_data]
        if len(by_name) < strategy.num_clients:
            return None
    if not by_name:
        return None
    bindings = tuple(
        ClientBinding(
            client=client,
            worker_id=by_name[client % len(by_name)].member.worker_id,
            tags=by_name[client % len(by_name)].capability.tags,
        )
        for client in range(strategy.num_clients)
    )
    if not select(strategy.client_selection, bindings, job.seed, 1):
        return None
    return RosterFormed(party=value.party, clients=bindings)


def open_round(job: JobSpec, value: FederatedRun, now_s: float) -> ClientsSelected:
    strategy = spec_of(job)
    deadline, num_extra = strategy.options.round_deadline_s, strategy.options.over_select
    selection, roster, number = strategy.client_selection, value.roster, value.round_num
    clients = select(selection, roster, job.seed, number, num_extra)
    num_needed = None
    if num_extra:
        num_wanted = len(select(selection, roster, job.seed, number))
        num_needed = _quorum(job, num_wanted, of_all=num_wanted)
    return ClientsSelected(
        party=value.party,
        round_num=value.round_num,
        clients=clients,
        deadline_s=None if deadline is None else now_s + deadline,
        num_needed=num_needed,
    )


def assign(
    job: JobSpec, value: FederatedRun, workers: list[WorkerRecord]
) -> ClientsAssigned | None:
    """A live worker for every client that has none: its own, else the one with fewest clients."""
    alive = {worker.member.worker_id: worker for worker in workers}
    if not lacking(value, lambda member: _is_alive(alive, member)):
        return None
    waiting = [c for c in value.selected if c not in value.updates and c not in value.rejected]
    current = {c: value.assigned[c][0] for c in waiting if c in value.assigned}
    held = {c: m for c, m in current.items() if _is_alive(alive, m)}
    load = Counter(member.worker_id for member in held.values())
    new = []
    for client in waiting:
        if client in held:
            continue
        worker = _worker_for(job, value.roster[client], alive, load)
        if worker is not None:
            load[worker.member.worker_id] += 1
        elif client not in current:
            continue
        new.append(Assignment(client=client, member=worker.member if worker else None))
    if not new:
        return None
    return ClientsAssigned(
        party=value.party,
        round_num=value.round_num,
        membership=value.membership + 1,
        assignments=tuple(new),
    )


def _is_alive(alive: Mapping[WorkerId, WorkerRecord], member: Member) -> bool:
    return member.worker_id in alive and alive[member.worker_id].member == member


def _worker_for(
    job: JobSpec,
    binding: ClientBinding,
    alive: Mapping[WorkerId, WorkerRecord],
    load: Counter[WorkerId],
) -> WorkerRecord | None:
    if binding.worker_id in alive:
        return alive[binding.worker_id]
    if job.data.worker_local is not None:
        return None
    selection = spec_of(job).client_selection
    required = set(selection.required_tags) if isinstance(selection, ByCapability) else set()
    fitting = [w for w in alive.values() if required <= set(w.capability.tags)]
    return min(
        fitting,
        key=lambda w: (load[w.member.worker_id], w.member.worker_id),
        default=None,
    )


def close(job: JobSpec, value: FederatedRun, now_s: float) -> RoundClosed | RunFailed | None:
    """Close the round when all have answered, or its deadline has passed."""
    num_selected = len(value.selected)
    num_answered = len(value.updates) + len(value.rejected)
    is_late = value.deadline_s is not None and now_s >= value.deadline_s
    suffices = value.num_needed is not None and len(value.updates) >= value.num_needed
    if num_answered < num_selected and not is_late and not suffices:
        return None
    count = f"round {value.round_num}: {len(value.updates)} of {num_selected} updates"
    settled = f", {value.num_needed} suffice" if suffices else ", deadline passed"
    reason = count + (settled if num_answered < num_selected else "")
    if value.rejected:
        reason += f", {len(value.rejected)} rejected ({_first_rejection(value)})"
    late = late_updates.accepted(value)
    if late:
        said = ", ".join(
            f"client {a.client} of round {value.round_num - a.staleness}" for a in late
        )
        reason += f", {len(late)} late ({said})"
    num_needed = value.num_needed or _quorum(job, num_selected)
    if len(value.updates) < num_needed:
        return RunFailed(reason=f"{reason}; {num_needed} are needed")
    on_time = [
        Accepted(client=client, digest=update.digest, num_samples=update.num_samples)
        for client, update in value.updates.items()
    ]
    return RoundClosed(
        party=value.party,
        round_num=value.round_num,
        accepted=tuple(sorted([*on_time, *late], key=lambda each: each.client)),
        reason=reason,
        by_policy=num_answered < num_selected or bool(late),
        metrics=round_metrics(
            value.updates,
            late_updates.received(value),
            num_skipped=value.trained.get(SKIPPED_STEPS, 0.0),
        ),
    )


def _quorum(job: JobSpec, num_selected: int, of_all: int = 1) -> int:
    """How many updates a round needs; of_all: where the job does not say."""
    quorum = spec_of(job).options.quorum
    if quorum is None:
        return of_all
    if isinstance(quorum, int):
        return min(quorum, num_selected)
    return max(1, ceil(quorum * num_selected - 1e-9))


def _first_rejection(value: FederatedRun) -> str:
    client = min(value.rejected)
    return f"client {client}: {value.rejected[client]}"


def complete(value: FederatedRun) -> RunCompleted | None:
    if value.to_evaluate:
        return None
    assert value.committed is not None
    return RunCompleted(reason=f"{value.committed.segment} rounds committed")
