"""Fold facts into the state; no other code makes a new CoordinatorState."""

from collections.abc import Mapping
from dataclasses import fields, replace

from stratagem.common.base.ids import RunId, WorkerId, is_within
from stratagem.common.job import JobSpec
from stratagem.common.numerics.verification import VERIFIER
from stratagem.common.strategy import DIRECT_ALL_REDUCE, all_reduce_of
from stratagem.coordinator.core.courses import needs_its_journal, resumed_metrics, with_course
from stratagem.coordinator.core.effects import Base, slots
from stratagem.coordinator.core.facts import (
    ROOT,
    SKIPPED_STEPS,
    TRAIN_LOSS,
    BlobsHeld,
    ClusterSummed,
    CommitUploaded,
    DataUploaded,
    Evaluated,
    Fact,
    GenerationClosed,
    Member,
    ModelBuilt,
    Noted,
    RoundClosed,
    RunCancelled,
    RunCompleted,
    RunDeleted,
    RunFailed,
    RunPinned,
    RunReleased,
    RunResumed,
    RunSubmitted,
    SegmentCommitted,
    SegmentFinished,
    SoleCopiesLost,
    UpdateReceived,
    VerificationEnded,
    WorkerDraining,
    WorkerLeft,
    WorkerLost,
    WorkerMarked,
    WorkerQuarantined,
    WorkerRegistered,
    WorkerReleased,
    WorkersForgotten,
)
from stratagem.coordinator.core.persistent import PersistentMap
from stratagem.coordinator.core.state import CommittedState, CoordinatorState, RunRecord, retained
from stratagem.coordinator.core.strategy_calls import Raised, is_hidden
from stratagem.coordinator.core.strategy_contract import Strategies
from stratagem.coordinator.core.world import RunPhase, WorkerRecord

CLUSTER = RunId("")

_OF_WORKER = fields(WorkerRecord)

MAX_UPLOADS = 256
"""The most uploads remembered per owner, the newest; a job that names an upload follows soon."""

MIN_COMMITS = 64
"""The least number of commits kept in memory per run: a commit evaluated later may be the best."""


def apply(state: CoordinatorState, run_id: RunId, fact: Fact, time_s: float) -> CoordinatorState:
    """Return the state after a fact that was journaled at time_s (leader clock)."""
    if isinstance(fact, DataUploaded):
        newest = (*state.uploads.get(fact.owner, ()), fact.digest)[-MAX_UPLOADS:]
        return replace(state, uploads=state.uploads.with_item(fact.owner, newest))
    if isinstance(fact, RunPinned):
        pinned = state.pinned - {fact.run_id}
        return replace(state, pinned=pinned | {fact.run_id} if fact.is_pinned else pinned)
    if isinstance(fact, VerificationEnded):
        return replace(state, verifications={**state.verifications, fact.run_id: fact})
    if isinstance(fact, BlobsHeld):
        present = {each: until_s for each, until_s in state.holds.items() if until_s > time_s}
        return replace(state, holds={**present, fact.listed: fact.until_s})
    if isinstance(fact, ClusterSummed):
        return _with_summary(state, fact)
    if run_id == CLUSTER:
        workers = _workers_after(state.workers, fact, time_s)
        return replace(state, workers=workers, runs=_runs_without(state, _gone_with(state, fact)))
    if isinstance(fact, RunDeleted):
        others = {name: run for name, run in state.runs.items() if name != run_id}
        verifications = {k: v for k, v in state.verifications.items() if k != run_id}
        ended = state.ended.without(run_id)
        return replace(state, runs=others, ended=ended, verifications=verifications)
    if isinstance(fact, RunSubmitted):
        record = _submitted(state.strategies, run_id, fact)
    else:
        record = _apply_to_run(state.runs[run_id], fact, time_s, state.workers)
    num_hidden = record.num_hidden + is_hidden(record.job, fact)
    num_facts = record.num_facts + 1
    record = replace(record, num_facts=num_facts, num_hidden=num_hidden, changed_s=time_s)
    return replace(state, runs={**state.runs, run_id: record})


def _with_summary(state: CoordinatorState, part: ClusterSummed) -> CoordinatorState:
    """Return the state with one part of the cluster's summary added; see facts.ClusterSummed."""
    workers, uploads = state.workers, state.uploads
    for known in part.workers:
        record = WorkerRecord(**{each.name: getattr(known, each.name) for each in _OF_WORKER})
        workers = workers.with_item(record.member.worker_id, record)
    for owner, digests in part.uploads.items():
        uploads = uploads.with_item(owner, digests)
    return replace(
        state,
        workers=workers,
        uploads=uploads,
        pinned=state.pinned | frozenset(part.pinned),
        verifications={**state.verifications, **{v.run_id: v for v in part.verifications}},
        holds={**state.holds, **part.holds},
    )


def _workers_after(
    workers: PersistentMap[WorkerId, WorkerRecord], fact: Fact, time_s: float
) -> PersistentMap[WorkerId, WorkerRecord]:
    match fact:
        case WorkerRegistered():
            record = WorkerRecord(fact.member, fact.address, fact.capability, registered_s=time_s)
            if old := workers.get(fact.member.worker_id):
                record = replace(record, quarantine=old.quarantine, marked_s=old.marked_s)
        case WorkerLost():
            record = replace(
                workers[fact.member.worker_id],
                is_alive=False,
                reason=fact.reason,
                is_blameless=fact.is_blameless,
                lost_s=time_s,
                beat_s=time_s - fact.silent_s,
            )
        case WorkerDraining():
            old = workers[fact.member.worker_id]
            record = replace(old, is_draining=True, reason="draining")
        case WorkerLeft():
            old = workers[fact.member.worker_id]
            if not (old.quarantine or old.marked_s):
                return workers.without(fact.member.worker_id)
            ended = replace(old, is_alive=False, is_draining=True, reason=fact.reason)
            record = replace(ended, lost_s=time_s, beat_s=time_s)
        case WorkerMarked() | WorkerQuarantined() | WorkerReleased():
            return _marked(workers, fact, time_s)
        case WorkersForgotten():
            for name in fact.names:
                workers = workers.without(name)
            return workers
        case _:
            raise AssertionError(f"{type(fact).__name__} is no fact of the cluster")
    return workers.with_item(record.member.worker_id, record)


def _marked(
    workers: PersistentMap[WorkerId, WorkerRecord],
    fact: WorkerMarked | WorkerQuarantined | WorkerReleased,
    time_s: float,
) -> PersistentMap[WorkerId, WorkerRecord]:
    old = workers.get(fact.worker_id)
    if old is None:  # it has left since
        return workers
    if isinstance(fact, WorkerMarked):
        record = replace(old, marked_s=time_s)
    elif isinstance(fact, WorkerQuarantined):
        record = replace(old, quarantine=fact.reason or "no reason was given")
    elif old.has_left:
        return workers.without(fact.worker_id)
    else:
        record = replace(old, quarantine="", marked_s=0.0)
    return workers.with_item(fact.worker_id, record)


def _gone_with(state: CoordinatorState, fact: Fact) -> Member | None:
    """Return the member that a fact removes for good: it left, or a newer process of its worker has
    registered; None if there is none. A lost member may come back."""
    if not isinstance(fact, WorkerLeft | WorkerRegistered):
        return None
    known = state.workers.get(fact.member.worker_id)
    if known is None or (isinstance(fact, WorkerRegistered) and known.member == fact.member):
        return None
    return known.member


def _runs_without(state: CoordinatorState, gone: Member | None) -> Mapping[RunId, RunRecord]:
    """Return the runs, with a member that is gone removed from the active ones: that member has
    nothing to release, and a long run would collect thousands of such members."""
    left = {
        run_id: replace(run, touched=run.touched - {gone})
        for run_id, run in state.runs.items()
        if gone is not None and run.ended is None and gone in run.touched
    }
    return {**state.runs, **left} if left else state.runs


def _submitted(strategies: Strategies, run_id: RunId, fact: RunSubmitted) -> RunRecord:
    job = JobSpec.of_run(fact.job_json, fact.numerics)
    record = RunRecord(
        run_id=run_id,
        job=job,
        strategy=strategies.of(job),
        value=None,
        submitted_wall_s=fact.wall_s,
        submitted_by=fact.by,
        owner=fact.owner or fact.by,
        submission=fact.submission,
        traceparent=fact.traceparent,
        numerics=fact.numerics,
    )
    try:
        return replace(record, value=record.strategy.init(job, ROOT, strategies))
    except Exception as error:  # the border to plug-ins; replay meets the same error
        return _raised(record, error)


def _apply_to_run(
    record: RunRecord, fact: Fact, time_s: float, workers: Mapping[WorkerId, WorkerRecord]
) -> RunRecord:
    record = _with_end(record, fact)
    record = _with_copies(_with_results(record, fact), fact)
    if isinstance(fact, ModelBuilt) and fact.rows:
        record = replace(record, rows={**record.rows, fact.party: fact.rows})
    if needs_its_journal(fact) and not is_within(getattr(fact, "party", ROOT), VERIFIER):
        record = replace(record, is_reproducible=False)
    try:
        record, used = _transition(record, fact, time_s)
    except Exception as error:  # the border to plug-ins; replay meets the same error
        return _raised(record, error)
    if record.ended is not None:
        return record
    new = used - record.touched
    if not new:
        return record
    there = frozenset(member for member in new if not _is_replaced(member, workers))
    touched = record.touched | there if there else record.touched
    return replace(record, touched=touched, is_released=False)


def _is_replaced(member: Member, workers: Mapping[WorkerId, WorkerRecord]) -> bool:
    """Return True if a newer process of the worker has taken this member's place. This may be so
    while the member's work is due, and in a replay, which reads all workers before any run."""
    worker = workers.get(member.worker_id)
    return worker is not None and worker.member != member


def _raised(record: RunRecord, error: Exception) -> RunRecord:
    reason = Raised.by(error)
    return replace(record, ended=RunPhase.FAILED, reason=reason, has_raised=True)


def _transition(
    record: RunRecord, fact: Fact, time_s: float
) -> tuple[RunRecord, frozenset[Member]]:
    """Return the run with the fact folded in, and the workers whose slots its due effects need."""
    if isinstance(fact, RunResumed) and fact.from_segment is not None:
        record = _returned(record, fact)
    strategy = record.strategy
    value = strategy.transition(record.job, record.value, fact, time_s)
    due = strategy.pending(record.run_id, record.job, value, None)
    used = frozenset[Member]().union(*(slots(effect) for effect in due))
    return replace(record, value=value), used


def _returned(run: RunRecord, fact: RunResumed) -> RunRecord:
    """Return the run as it was at the commit from which it is resumed."""
    nesting = run.strategy.nesting
    assert nesting is not None
    assert fact.from_segment is not None
    base = Base(fact.from_segment, fact.step, fact.digest, fact.streams, fact.average)
    at = base.segment, base.step, base.digest
    here = CommittedState(*at, {}, base.streams, base.average)  # a verification may lag far behind
    here = next((commit for commit in run.commits if commit.segment == base.segment), here)
    # Of the commits before it, the states of those that were not retained are deleted.
    before = (commit for commit in retained(run) if commit.segment < base.segment)
    commits = (*before, here) if base.digest else ()  # none before a population's first
    if nesting.returned is not None:
        value = nesting.returned(run.job, run.value, base, here.metrics)
    else:
        num_rows = nesting.progress(run.value).num_rows
        value = nesting.rebase(run.job, run.value, base, num_rows)
    return replace(
        run,
        value=value,
        commits=commits,
        metrics=here.metrics,
        num_returns=run.num_returns + 1,
        is_reproducible=run.is_reproducible and not fact.by_policy,
    )


def _with_end(record: RunRecord, fact: Fact) -> RunRecord:
    match fact:
        case RunCompleted():
            ended = RunPhase.COMPLETED
        case RunFailed():
            record = replace(record, error=fact.error)
            ended = RunPhase.FAILED
        case RunCancelled():
            ended = RunPhase.CANCELLED
        case RunResumed():
            return replace(record, ended=None, reason="", error=None)
        case RunReleased():
            return replace(record, is_released=True, touched=frozenset())
        case _:
            return record
    return replace(record, ended=ended, reason=fact.reason)


def _with_results(record: RunRecord, fact: Fact) -> RunRecord:
    """Add the fact's commits and metrics to the run. Commits and metrics of a party below the root
    are left out: they concern its strategy alone."""
    party = getattr(fact, "party", ROOT)
    if party != ROOT:
        return record if is_within(party, VERIFIER) else _with_engine(record, fact)
    match fact:
        case ModelBuilt():
            metrics = resumed_metrics(record.job)
            commit = CommittedState(fact.segment, fact.step, fact.digest, metrics, fact.streams)
            return _with_commit(_with_metrics(record, metrics), commit)
        case SegmentCommitted():
            commit = CommittedState(
                fact.segment,
                fact.step,
                fact.digest,
                fact.metrics,
                fact.streams,
                fact.average,
                fact.is_partial,
            )
            return _with_commit(_with_metrics(record, fact.metrics), commit)
        case SegmentFinished():
            trained = {TRAIN_LOSS: fact.loss} if fact.step else {}
            record = _with_metrics(record, {**trained, **fact.metrics, **_traffic(fact)})
            return _with_engine(record, fact)
        case UpdateReceived(num_steps=0):  # a version that took the newest update for all
            metrics = {TRAIN_LOSS: fact.loss, **fact.metrics, **_traffic(fact)}
            if SKIPPED_STEPS in fact.metrics:  # of this client's round alone
                metrics[SKIPPED_STEPS] += record.metrics.get(SKIPPED_STEPS, 0)
            return _with_metrics(record, metrics)
        case Evaluated():
            commits = tuple(
                replace(c, metrics=_evaluated(record.job, c.metrics, fact.metrics))
                if c.segment == fact.segment
                else c
                for c in record.commits
            )
            predictions = fact.predictions or record.predictions
            record = replace(record, commits=commits, predictions=predictions)
            # An evaluation given up for some clients is of a state that was superseded long ago.
            return record if fact.without else _with_metrics(record, fact.metrics)
        case Noted():
            if fact.digest:
                commit = CommittedState(fact.segment, fact.step, fact.digest, fact.metrics)
                record = _with_commit(_with_metrics(record, fact.metrics), commit)
            return record
        case GenerationClosed():
            commit = CommittedState(fact.generation, fact.step, fact.digest, fact.metrics)
            return _with_commit(_with_metrics(record, fact.metrics), commit)
        case RoundClosed():
            return _with_metrics(record, fact.metrics)
        case _:
            return record


def _with_copies(record: RunRecord, fact: Fact) -> RunRecord:
    """Return the run after a fact about the commit parts that only workers have: once uploaded, the
    commit is whole; once lost, the run goes on from the last whole commit."""
    if getattr(fact, "party", ROOT) != ROOT:
        return record
    commits = record.commits
    if isinstance(fact, CommitUploaded):
        whole = replace(commits[-1], digest=fact.digest, is_partial=False)
        return replace(record, commits=(*commits[:-1], whole))
    if not isinstance(fact, SoleCopiesLost | RunResumed):
        return record
    while commits and commits[-1].is_partial:
        commits = commits[:-1]
    return record if commits == record.commits else replace(record, commits=commits)


def _evaluated(
    job: JobSpec, metrics: Mapping[str, float], evaluated: Mapping[str, float]
) -> Mapping[str, float]:
    """Return the metrics of a commit with those of a later evaluation added."""
    return {**metrics, **with_course(job, metrics, evaluated)}


def _traffic(fact: SegmentFinished | UpdateReceived) -> dict[str, float]:
    """Return the traffic metrics of a fact. They depend on which members are present, so they
    belong to no commit."""
    return {f"train.{name}": float(value) for name, value in fact.traffic.items()}


def _with_engine(record: RunRecord, fact: Fact) -> RunRecord:
    if not isinstance(fact, SegmentFinished):
        return record
    in_fixed_order = all_reduce_of(record.job.strategy) == DIRECT_ALL_REDUCE
    is_reproducible = record.is_reproducible and in_fixed_order
    return replace(record, engine=fact.engine, is_reproducible=is_reproducible)


def _with_commit(record: RunRecord, commit: CommittedState) -> RunRecord:
    return _trimmed(replace(record, commits=(*record.commits, commit)))


def _trimmed(record: RunRecord) -> RunRecord:
    """Drop commits far beyond the retention limit, so that a long run stays small."""
    num_kept = max(record.job.retention, MIN_COMMITS)
    if len(record.commits) <= 2 * num_kept:
        return record
    return replace(record, commits=retained(record, num_kept))


def _with_metrics(record: RunRecord, metrics: Mapping[str, float]) -> RunRecord:
    return replace(record, metrics={**record.metrics, **metrics})
