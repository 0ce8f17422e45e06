"""Decide the members and the end of a synchronous party, and derive its effects."""

from collections.abc import Callable, Mapping

from stratagem.common.base.ids import Digest, Party, RunId
from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.courses import num_lr_reductions, why
from stratagem.coordinator.core.effects import (
    Build,
    CommitSegment,
    Effect,
    RunSegment,
    UploadCommit,
)
from stratagem.coordinator.core.facts import (
    SKIPPED_STEPS,
    TRAIN_LOSS,
    Fact,
    Member,
    MembersFormed,
    ProcessDied,
    RunCompleted,
    RunFailed,
    SoleCopiesLost,
    StoppedEarly,
    UploadDue,
)
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.core.run_view import steps_per_epoch
from stratagem.coordinator.core.strategy_contract import (
    NestedProgress,
    PartyView,
    RunCounts,
    Status,
)
from stratagem.coordinator.core.world import RunPhase, World
from stratagem.coordinator.strategies.placement import eligible, why_none
from stratagem.coordinator.strategies.schedule import (
    TRAIN_SPLIT,
    SegmentSchedule,
    commit_metrics,
    schedule_of,
)
from stratagem.coordinator.strategies.synchronous.party import (
    Parts,
    PartyRun,
    Placed,
    SegmentRules,
    are_moved,
    goes_on,
    latest_metrics,
    mirrors_of,
    needs_upload,
    num_segments,
    one_part,
    stop_reason,
)

# ---- Decisions ----


def decide(
    job: JobSpec, run: PartyRun, shape: SegmentRules, world: World, now_s: float
) -> Fact | None:
    """Return the next fact: the run fails because too many workers died, is complete or stopped
    early, or its members change; None if nothing changes."""
    if run.deaths.are_too_many:
        reason = why(f"segment {run.open_segment}", run.deaths)
        return RunFailed(reason=reason, cause=Cause.CRASHED)
    if run.committed is not None and run.committed.segment == num_segments(job, run):
        return RunCompleted(reason=_what_was_done(job, run, run.committed.step))
    is_whole = run.committed is not None and not run.finished and not run.kept
    if run.committed is not None and is_whole and (why_now := stop_reason(job, run)):
        reason = f"stopped early after {counted(run.committed.step, 'step')}: {why_now}"
        return StoppedEarly(reason=reason, step=run.committed.step)
    return members_due(job, run, shape, world) or _copies_due(job, run, world, now_s)


def _copies_due(
    job: JobSpec, run: PartyRun, world: World, now_s: float
) -> UploadDue | SoleCopiesLost | None:
    """Return the fact that workers must upload the files of the commit that they alone have, or
    that such files are lost; None if neither is due.

    An absent worker may come back with its files, and is waited for; one that has left will not. A
    worker that was asked may have sent its files before: the upload finds out.
    """
    if run.committed is None or not needs_upload(job, run):
        return None
    records = [world.workers.get(file.worker_id) for file in run.kept]
    here = tuple(record.member for record in records if record is not None and record.is_alive)
    at = (run.party, run.committed.segment)
    if len(here) == len(run.kept):
        if here == run.holders:
            return None
        reason = f"it goes to {counted(len(run.members), 'worker')}"
        if not run.members or not are_moved(run):
            reason = "the training stops here"
        return UploadDue(party=at[0], segment=at[1], holders=here, reason=reason)
    has_left = any(record is None or record.has_left for record in records)
    is_late = run.awaits_until_s is not None and now_s >= run.awaits_until_s
    if run.holders or not (has_left or is_late):
        return None
    names = {member.worker_id for member in here}
    gone = ", ".join(file.worker_id for file in run.kept if file.worker_id not in names)
    reason = (
        f"what only {gone} had is gone with {'it' if len(run.kept) == len(here) + 1 else 'them'}"
    )
    return SoleCopiesLost(party=at[0], segment=at[1], reason=reason)


def deadline(run: PartyRun) -> float | None:
    """Return the leader-clock time until which the party waits for absent workers that alone have
    files of its commit."""
    return run.awaits_until_s


def _what_was_done(job: JobSpec, run: PartyRun, num_steps: int) -> str:
    if not job.only_evaluates or job.evaluation is None:
        return f"{counted(num_steps, 'step')} committed"
    split = job.evaluation.split
    return f"{run.num_rows[split]} rows of {split} evaluated"


def members_due(
    job: JobSpec, run: PartyRun, shape: SegmentRules, world: World
) -> MembersFormed | None:
    """Return the fact that forms a new membership if the members should change; else None."""
    placed = (shape.place or _any_workers(shape))(job, run, world)
    members = placed.members
    if members == run.members:
        return None
    first = world.workers[members[0].worker_id].capability if members else None
    fingerprint = run.fingerprint or (first.numerics_fingerprint if first else "")
    are_apart = len(members) > 1 and _are_apart(members, world)
    reason = _why_reformed(run.members, members, shape, world)
    return MembersFormed(
        party=run.party,
        membership=run.membership + 1,
        members=members,
        reason=reason + _what_follows(job, run, members, shape, are_apart=are_apart),
        fingerprint=fingerprint if job.execution.deterministic else "",
        ranks=placed.ranks,
        are_apart=are_apart,
    )


def _what_follows(
    job: JobSpec,
    run: PartyRun,
    members: tuple[Member, ...],
    shape: SegmentRules,
    *,
    are_apart: bool,
) -> str:
    """Return a text on what becomes of uncommitted steps under these members, or ""."""
    at = run.committed
    if job.only_evaluates or not run.open_segment or at is None:
        return ""
    if not members or not (run.members or run.is_recovering):
        return ""
    if goes_on(run, members, shape, are_apart=are_apart):
        is_sliced = shape.fewest_mirrored is not None
        return "; each slice of the state is left with one of them" if is_sliced else ""
    return f"; back to the last commit, segment {at.segment} at step {at.step}"


def setback(job: JobSpec, run: PartyRun, shape: SegmentRules) -> str:
    """Return a sentence that says what is lost if the present members meet again, as after a failed
    exchange; "" if nothing is."""
    if goes_on(run, run.members, shape, are_apart=run.are_apart):
        return ""
    return _what_follows(job, run, run.members, shape, are_apart=run.are_apart)


def _any_workers(shape: SegmentRules) -> Callable[[JobSpec, PartyRun, World], Placed]:
    """Return a placement function that keeps present members and adds any workers that can join, up
    to one per shard."""

    def place(job: JobSpec, run: PartyRun, world: World) -> Placed:
        alive = tuple(member for member in run.members if world.holds(member))
        members = _as_kept(run, alive + _joining(job, run, shape, world, alive))
        return Placed(members if len(members) >= shape.min_members else ())

    return place


def _as_kept(run: PartyRun, members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Return the members in the order of the replicas that they have kept, if a holder of every
    replica is back, so that each one continues with its own; otherwise unchanged."""
    places = {file.worker_id: place for place, file in enumerate(run.kept)}
    if {member.worker_id for member in members} != set(places):
        return members
    return tuple(sorted(members, key=lambda member: places[member.worker_id]))


def _joining(
    job: JobSpec, run: PartyRun, shape: SegmentRules, world: World, alive: tuple[Member, ...]
) -> tuple[Member, ...]:
    if len(alive) >= shape.num_shards:
        return ()
    spare = [
        worker for worker in eligible(job, world, run.fingerprint) if worker.member not in alive
    ]
    joining = tuple(worker.member for worker in spare[: shape.num_shards - len(alive)])
    returns = shape.returns(run.members) or run.are_apart or _are_apart(joining, world)
    if returns and run.finished and alive == run.members:
        # They would return the party to its last commit: let them wait until there is a new one.
        return ()
    return joining


def _are_apart(members: tuple[Member, ...], world: World) -> bool:
    """Return True if a member is reached through a tunnel, and so not by the others."""
    return any(world.workers[member.worker_id].capability.tunnelled for member in members)


def _why_reformed(
    old: tuple[Member, ...], new: tuple[Member, ...], shape: SegmentRules, world: World
) -> str:
    gone = [member for member in old if member not in new]
    by_how = {
        "lost": [m for m in gone if not _has_left(world, m) and not world.holds(m)],
        "left": [m for m in gone if _has_left(world, m)],
        "released": [m for m in gone if world.holds(m)],
        "joined": [m for m in new if m not in old],
    }
    parts = [f"{', '.join(m.worker_id for m in who)} {how}" for how, who in by_how.items() if who]
    count = f"{len(new)} workers" if shape.place else f"{len(new)} of {shape.num_shards} workers"
    return ", ".join([*parts, count])


def _has_left(world: World, member: Member) -> bool:
    """Return True if the member was asked to end, and is draining or gone, or is quarantined."""
    record = world.workers.get(member.worker_id)
    if record is None or record.member != member:
        return record is None
    return record.is_draining or bool(record.quarantine)


def reform(run: PartyRun, party: Party, reason: str) -> MembersFormed:
    """Return the fact that gives the same members a new membership, after a failed exchange."""
    return MembersFormed(
        party=party,
        membership=run.membership + 1,
        members=run.members,
        reason=reason,
        fingerprint=run.fingerprint,
        ranks=run.ranks,
        are_apart=run.are_apart,
    )


# ---- Queries ----
#
# The rest of the coordinator, and the enclosing strategy, query a party with these functions.


def parties(run: PartyRun) -> Mapping[Party, PartyView]:
    """Return this party by its path, as the only one whose members exchange tensors."""
    return {run.party: PartyView(run.membership, run.members)}


def deaths(run: PartyRun, member: Member) -> tuple[ProcessDied, ...]:
    """Return the death to count if the member was at work on the open segment, else none."""
    if member not in run.members and member not in run.left:
        return ()
    return (ProcessDied(party=run.party, member=member, segment=run.open_segment),)


def blobs(run: PartyRun) -> frozenset[Digest]:
    """Return the states to which the party may have to return."""
    bases = (run.committed, None if run.whole is None else run.whole.base)
    return frozenset(base.digest for base in bases if base is not None)


def progress(run: PartyRun) -> NestedProgress:
    """Return the progress of the party, up to the committed segment."""
    is_idle = not run.finished
    return NestedProgress(run.committed, run.metrics, run.num_rows, run.loss, is_idle, run.traffic)


def status(job: JobSpec, run: PartyRun, shape: SegmentRules, world: World) -> Status:
    """Return the party's status, for people."""
    ends: tuple[int, ...] = ()
    if run.committed is not None:
        ends = schedule_of(job, run.num_rows).ends()
    rows = 0 if job.only_evaluates else run.num_rows.get(TRAIN_SPLIT, 0)
    trained = run.finished[-1] if run.finished else run.committed
    phase, strategy_phase, reason = phase_of(job, run, shape, world)
    is_over = run.open_segment > 0 and (
        run.open_segment > num_segments(job, run) or bool(stop_reason(job, run))
    )
    if strategy_phase == "TRAINING" and is_over:
        phase, strategy_phase = RunPhase.RUNNING, "COMMITTING"
    return Status(
        phase=phase,
        strategy_phase=strategy_phase,
        reason=reason,
        step=trained.step if trained else 0,
        num_steps=ends[-1] if ends else 0,
        segment=trained.segment if trained else 0,
        num_segments=len(ends),
        members=run.members,
        counts=RunCounts(steps_per_epoch=steps_per_epoch(rows, job.batch_size)),
    )


def phase_of(
    job: JobSpec, run: PartyRun, shape: SegmentRules, world: World
) -> tuple[RunPhase, str, str]:
    """Return the run's phase, the strategy's phase (TRAINING once it has a state), and the
    reason."""
    if not run.members:
        need = f"waiting for {shape.min_members} of {shape.num_shards} workers"
        reason = f"{need}: {why_none(job, world, run.fingerprint)}"
        if shape.why_missing is not None:
            reason = shape.why_missing(job, run, world)
        phase = RunPhase.RECOVERING if run.is_recovering else RunPhase.PLACING
        return phase, "WAITING", reason
    if run.open_segment == 0:
        return RunPhase.RUNNING, "BUILDING", run.why
    return RunPhase.RECOVERING if run.is_recovering else RunPhase.RUNNING, "TRAINING", run.why


# ---- Effects ----
#
# A synchronous party needs the commit that is due, and the segment to train.

MAX_UNCOMMITTED = 2
"""The most finished segments whose snapshots wait for their commit; bounds the workers' memory."""


def pending(
    run_id: RunId, job: JobSpec, run: PartyRun, shape: SegmentRules, horizon: int | None = None
) -> frozenset[Effect]:
    """Return the effects due: the build until there is a state; then commit, upload, segment."""
    if run.committed is None:
        if not run.members:
            return frozenset()
        return frozenset({Build(run_id, run.party, run.membership, run.members[0])})
    effects: set[Effect] = set()
    if run.finished:
        done = run.finished[0]
        parts_of = one_part if done.kept else shape.parts_of  # what all have, any of them has
        present = frozenset(run.members)
        parts = _left_of(parts_of(done.sources, run.ranks), present)
        is_mirrored = not done.kept and shape.is_mirrored(done.sources)
        mirrors = _left_of(mirrors_of(done.sources), present) if is_mirrored else ()
        trained = {TRAIN_LOSS: done.loss} if done.step else {}  # one that trains nothing has none
        metrics = commit_metrics(job, trained, done.metrics)
        effects.add(
            CommitSegment(
                run_id,
                run.party,
                done.segment,
                done.step,
                run.membership,
                parts,
                metrics,
                mirrors,
                done.streams,
                bool(done.kept),
            )
        )
    if run.holders and needs_upload(job, run):
        digests = tuple(file.digest for file in run.kept)
        effects.add(
            UploadCommit(
                *(run_id, run.party, run.committed.segment, run.membership),
                run.committed,
                run.holders,
                digests,
            )
        )
    schedule = schedule_of(job, run.num_rows)
    may_begin = horizon is None or run.open_segment <= horizon
    has_open = 0 < run.open_segment <= len(schedule.ends())
    has_room = len(run.finished) < MAX_UNCOMMITTED
    may_begin = may_begin and not stop_reason(job, run) and not are_moved(run)
    if run.members and may_begin and has_open and has_room:
        effects.add(_segment(run_id, job, run, shape, schedule))
    return frozenset(effects)


def _left_of(parts: Parts, present: frozenset[Member]) -> Parts:
    return tuple(tuple(member for member in part if member in present) for part in parts)


def _segment(
    run_id: RunId, job: JobSpec, run: PartyRun, shape: SegmentRules, schedule: SegmentSchedule
) -> RunSegment:
    assert run.committed is not None
    to_step = schedule.ends()[run.open_segment - 1]
    evaluation = job.evaluation
    splits = (evaluation.split,) if evaluation and schedule.evaluates_at(to_step) else ()
    return RunSegment(
        run_id=run_id,
        party=run.party,
        membership=run.membership,
        segment=run.open_segment,
        to_step=to_step,
        base=run.committed,
        lineage=run.lineage,
        members=run.members,
        num_shards=shape.num_shards,
        exchange=shape.exchange,
        parts=shape.parts_of(run.members, run.ranks),
        ranks=run.ranks,
        evaluate=splits,
        num_lr_reductions=num_lr_reductions(latest_metrics(run)),
        num_steps=schedule.num_steps,
        num_skipped=int(latest_metrics(run).get(SKIPPED_STEPS, 0)),
        kept=tuple(file.digest for file in run.kept),
        is_mirrored=shape.fewest_mirrored is not None,
        keeps=run.open_segment % shape.upload_every > 0 and to_step < schedule.num_steps,
    )
