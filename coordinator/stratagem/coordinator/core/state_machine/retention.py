"""Retention limits: lost workers and ended runs are forgotten when they are too old or too many,
and no run needs them."""

from collections.abc import Iterator
from itertools import chain, islice

from stratagem.common.base.ids import WorkerId
from stratagem.coordinator.core.commands import ExpireRuns, ForgetWorkers, JournalEntry
from stratagem.coordinator.core.effects import slots
from stratagem.coordinator.core.facts import RunExpired, WorkersForgotten
from stratagem.coordinator.core.state import (
    CoordinatorState,
    EndedRun,
    RunRecord,
    WorkerRecord,
    initial_of,
)
from stratagem.coordinator.core.state_machine.apply import CLUSTER
from stratagem.coordinator.core.state_machine.strategy_boundary import parties_of


def forget_workers(state: CoordinatorState, command: ForgetWorkers) -> tuple[JournalEntry, ...]:
    """Return the fact that forgets the workers beyond the limits, if there are any."""
    lost = sorted(
        (worker for worker in state.workers.values() if not worker.is_alive),
        key=lambda record: (record.lost_s, record.member.worker_id),
    )
    num_beyond = len(lost) - command.num_kept
    old = [
        record
        for number, record in enumerate(lost)
        if number < num_beyond or record.lost_s < _limit(record, command)
    ]
    if not old:
        return ()
    active = [run for run in state.runs.values() if run.ended is None]
    named = _named(active)
    names = tuple(
        record.member.worker_id
        for record in old
        if record.member.worker_id not in named and not _hosts_data_of(record, active)
    )
    return (JournalEntry(CLUSTER, WorkersForgotten(names=names)),) if names else ()


def _limit(worker: WorkerRecord, command: ForgetWorkers) -> float:
    if worker.capability.ephemeral:
        return max(command.ephemeral_before_s, command.lost_before_s)
    return command.lost_before_s


def _named(runs: list[RunRecord]) -> frozenset[WorkerId]:
    """Return the workers that these runs have work for, or have as members."""
    due = chain.from_iterable(
        run.strategy.pending(run.run_id, run.job, run.value, None) for run in runs
    )
    parties = chain.from_iterable(parties_of(run).values() for run in runs)
    members = chain(
        chain.from_iterable(map(slots, due)),
        chain.from_iterable(party.members for party in parties),
    )
    return frozenset(member.worker_id for member in members)


def _hosts_data_of(worker: WorkerRecord, runs: list[RunRecord]) -> bool:
    """Return True when the worker has data of its own that one of these runs trains on, and waits
    for."""
    names = worker.capability.local_data
    return any(run.job.data.worker_local in names for run in runs)


def expire_runs(state: CoordinatorState, command: ExpireRuns) -> tuple[JournalEntry, ...]:
    """Return the facts that delete the runs beyond the limits. A run that is not archived stays,
    and so does one that another run has begun from. One that is pinned stays, too, and does not
    count."""
    named = frozenset(map(initial_of, state.runs.values()))
    # What a run began from is the state of another run.
    free = (
        run
        for run in _beyond(state, command)
        if not any(
            blob in named or state.ended.is_begun_from(blob)
            for blob in run.blobs
            if blob != run.initial
        )
    )
    return tuple(
        JournalEntry(run.run_id, RunExpired(reason=command.reason, submission=run.submission))
        for run in islice(free, command.limit)
    )


def _beyond(state: CoordinatorState, command: ExpireRuns) -> Iterator[EndedRun]:
    """Yield the archived runs that are too old, or too many, the oldest first. Only these are
    looked at, as there may be very many others."""
    num_pinned = sum(run_id in state.ended for run_id in state.pinned)
    num_beyond = len(state.ended) - num_pinned - command.num_kept
    loose = (run_id for _, run_id in state.ended.by_end if run_id not in state.pinned)
    for number, run_id in enumerate(loose):
        run = state.ended[run_id]
        if number >= num_beyond and run.ended_s >= command.ended_before_s:
            return
        yield run
