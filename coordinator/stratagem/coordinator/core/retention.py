"""Apply the retention limits, resume runs from kept commits, attribute process deaths to work, and
decide which blobs a caller may name in a job.

Lost workers and ended runs are forgotten when they are too old or too many, unless a run needs
them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain, islice, zip_longest
from typing import Final, TypeVar

from stratagem.common.base.ids import Digest, RunId, WorkerId, is_within
from stratagem.coordinator.core.apply import CLUSTER
from stratagem.coordinator.core.commands import Ending, ExpireRuns, ForgetWorkers, JournalEntry
from stratagem.coordinator.core.courses import was_asked_to_end
from stratagem.coordinator.core.effects import slots
from stratagem.coordinator.core.facts import (
    ROOT,
    ClusterSummed,
    Fact,
    KnownWorker,
    Member,
    ProcessDied,
    RunExpired,
    RunResumed,
    WorkersForgotten,
)
from stratagem.coordinator.core.pending import blobs_of
from stratagem.coordinator.core.run_view import CommitView, RunView
from stratagem.coordinator.core.state import (
    CommittedState,
    CoordinatorState,
    EndedRun,
    RunRecord,
    initial_of,
    retained,
)
from stratagem.coordinator.core.strategy_calls import deaths_of, parties_of
from stratagem.coordinator.core.world import WorkerRecord

# ---- Retention limits ----


def forget_workers(state: CoordinatorState, command: ForgetWorkers) -> tuple[JournalEntry, ...]:
    """Return the fact that forgets lost workers beyond the limits, if no active run needs them and
    they are not quarantined."""
    lost = sorted(
        (each for each in state.workers.values() if not each.is_alive and not each.quarantine),
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
    """Return the workers that are members of these runs, or that their due effects need."""
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
    """Return True if the worker has local data that one of these runs waits for."""
    names = worker.capability.local_data
    return any(run.job.data.worker_local in names for run in runs)


def expire_runs(state: CoordinatorState, command: ExpireRuns) -> tuple[JournalEntry, ...]:
    """Return the facts that delete the archived runs beyond the limits. A run from which another
    run has begun is kept. A pinned run is kept, too, and does not count."""
    named = frozenset(map(initial_of, state.runs.values()))
    # The initial state of a run belongs to another run.
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
    """Yield the archived runs that are too old or too many, the oldest first, without looking at
    the others, which may be very many."""
    num_pinned = sum(run_id in state.ended for run_id in state.pinned)
    num_beyond = len(state.ended) - num_pinned - command.num_kept
    loose = (run_id for _, run_id in state.ended.by_end if run_id not in state.pinned)
    for number, run_id in enumerate(loose):
        run = state.ended[run_id]
        if number >= num_beyond and run.ended_s >= command.ended_before_s:
            return
        yield run


# ---- Summary of the cluster ----
#
# The summary consists of facts that replace those that led to the cluster's state.
#
# A takeover folds the facts of the cluster from the first one on. Workers that restart for years
# write millions of facts, of which the state keeps one record per worker. The summary has several
# parts, so that each row of the journal, and each step of writing it, stays small.

T = TypeVar("T")

WORKERS_EACH: Final = 256
"""Workers in one part of the summary."""
PINS_EACH: Final = 4096
OWNERS_EACH: Final = 16
"""Owners in one part of the summary, each with a few hundred uploads."""


def summary_of(state: CoordinatorState) -> list[ClusterSummed]:
    """Return the parts of the cluster's summary, at least one; never more than there were facts."""
    workers = _batches(map(_known, state.workers.values()), WORKERS_EACH)
    pinned = _batches(sorted(state.pinned), PINS_EACH)
    uploads = map(dict, _batches(state.uploads.items(), OWNERS_EACH))
    verified = _batches(state.verifications.values(), WORKERS_EACH)
    parts = zip_longest([dict(state.holds)], workers, pinned, uploads, verified)
    return [
        ClusterSummed(
            holds=held or {},
            workers=known or (),
            pinned=pins or (),
            uploads=owned or {},
            verifications=results or (),
        )
        for held, known, pins, owned, results in parts
    ]


def _known(record: WorkerRecord) -> KnownWorker:
    return KnownWorker(**{each.name: getattr(record, each.name) for each in fields(record)})


def _batches(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Yield the items in tuples of this size; the last one may be shorter."""
    left = iter(items)
    while batch := tuple(islice(left, size)):
        yield batch


# ---- Rollback ----
#
# A run that ended continues from an earlier kept commit. It is the same run: everything after the
# commit is undone and happens again. The facts stay in the journal.


def resumed_from(run: RunRecord, segment: int, by: str) -> RunResumed | str:
    """Return the fact that resumes a run from a kept commit, or why that is impossible."""
    kept = {commit.segment: commit for commit in retained(run) if not commit.is_partial}
    if segment not in kept:
        known = ", ".join(map(str, sorted(kept))) or "none"
        return f"segment {segment} is no kept commit of run {run.run_id!r}; kept are {known}"
    commit = kept[segment]
    last = run.commits[-1].segment
    nesting = run.strategy.nesting
    inside = [child for child in run.strategy.children(run.value) if child.party == ROOT]
    if nesting is None or any(child.strategy.nesting is None for child in inside):
        return (
            f"under this strategy run {run.run_id!r} goes on from its last commit ({last}) alone, "
            f"and not from segment {segment}: its others hold only a part of what it needs"
        )
    return RunResumed(
        by=by,
        from_segment=segment,
        step=commit.step,
        digest=commit.digest,
        by_policy=nesting.progress(run.value).keeps_more,
        streams=commit.streams,
        average=commit.average,
    )


# ---- Attribution of process ends ----
#
# The end of a process is attributed to the work during which it died, according to the report of
# the worker's next process.


def deaths_at_work(
    state: CoordinatorState, member: Member, ending: Ending | None
) -> tuple[JournalEntry, ...]:
    """Return the deaths to journal for a member whose process has ended without draining.

    There are none if the process was stopped from outside. If the plan that the process executed is
    known, only deaths during that work count.
    """
    if ending is None or ending.incarnation != member.incarnation:
        ending = Ending(member.incarnation)
    if ending.is_stopped or was_asked_to_end(ending.status):
        return ()
    entries: list[JournalEntry] = []
    for run_id, run in state.runs.items():
        if run.ended is None and member in run.touched and ending.run_id in (None, run_id):
            entries += [
                JournalEntry(run_id, _told(fact, ending)) for fact in deaths_of(run, member)
            ]
    return tuple(entry for entry in entries if _concerns(entry.fact, ending))


def _told(fact: Fact, ending: Ending) -> Fact:
    """Return the fact; a death is given the details that the worker's next process reports."""
    if not isinstance(fact, ProcessDied):
        return fact
    at = None if ending.run_id is None else ending.party
    known = {"at": at, "step": ending.step, "status": ending.status, "lines": ending.lines}
    return fact.model_copy(update=known)


def _concerns(fact: Fact, ending: Ending) -> bool:
    """Return True if the death counts against the party whose plan the process executed, or one
    above it; True for facts that are not deaths."""
    if not isinstance(fact, ProcessDied) or ending.run_id is None:
        return True
    return is_within(ending.party, fact.party)


# ---- Ownership of blobs ----
#
# These rules decide which blobs a caller may name in a job, and who owns a blob, as far as the
# state alone decides it.
#
# Knowing the digest of a blob does not amount to having its bytes: a blob belongs to the owners
# that have uploaded all of them, and to the owners of runs that name it. The states that a run
# has committed are shared with all callers that may read runs.


def has_brought(state: CoordinatorState, owner: str, digest: Digest) -> bool:
    """Return True if the owner has uploaded the blob, or owns a run that needs it."""
    if digest in state.uploads.get(owner, ()):
        return True
    if state.ended.has_brought(owner, digest):
        return True
    return any(run.owner == owner and digest in blobs_of(run) for run in state.runs.values())


def is_shared(state: CoordinatorState, digest: Digest) -> bool:
    """Return True if the blob is a committed state, or the predictions, of some run."""
    return state.ended.has_committed(digest) or any(
        digest in states_of(run) for run in state.runs.values()
    )


def states_of(run: RunRecord) -> frozenset[Digest]:
    """Return the blobs of a run that every caller who may read runs may download."""
    committed = {digest for each in run.commits for digest in (each.digest, each.average)}
    return frozenset({*committed, run.predictions or Digest("")} - {Digest("")})


def resting_with(state: CoordinatorState, digest: Digest) -> list[RunId]:
    """Return the archived runs that need the blob as a state or an input, the oldest first."""
    found = sorted(
        state.ended.needing(digest).values(), key=lambda run: (run.submitted_wall_s, run.run_id)
    )
    return [run.run_id for run in found]


def runs_with(state: CoordinatorState, digest: Digest, views: Mapping[RunId, RunView]) -> list[str]:
    """Return the runs that need a blob, archived ones first, each as text with the segment that the
    blob is the commit of.

    views: the views of the archived runs that need the blob.
    """
    named: list[str] = []
    for run_id in resting_with(state, digest):
        view = views.get(run_id)
        named.append(_blobs_named(run_id, digest, () if view is None else view.commits))
    for run in state.runs.values():
        if digest in blobs_of(run):
            named.append(_blobs_named(run.run_id, digest, run.commits))
    return named


def _blobs_named(
    run_id: RunId, digest: Digest, commits: Sequence[CommittedState] | Sequence[CommitView]
) -> str:
    segments = [each.segment for each in commits if digest in (each.digest, each.average)]
    return f"{run_id}, segment {segments[-1]}" if segments else run_id
