"""Queries about a party, for the rest of the coordinator and for a strategy around this one."""

from collections.abc import Mapping

from stratagem.common.base.ids import Digest, Party
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.facts import Member, ProcessDied
from stratagem.coordinator.core.state import RunPhase, World
from stratagem.coordinator.core.strategy_contract import (
    NestedProgress,
    PartyView,
    RunCounts,
    Status,
)
from stratagem.coordinator.core.time_left import steps_per_epoch
from stratagem.coordinator.strategies.scheduling.placement import why_none
from stratagem.coordinator.strategies.scheduling.segment_schedule import TRAIN_SPLIT, schedule_of
from stratagem.coordinator.strategies.synchronous.segments.synchronous_run import (
    PartyRun,
    SegmentRules,
    num_segments,
    stop_reason,
)


def parties(run: PartyRun) -> Mapping[Party, PartyView]:
    """Return the party itself as the only one that exchanges tensors."""
    return {run.party: PartyView(run.membership, run.members)}


def deaths(run: PartyRun, member: Member) -> tuple[ProcessDied, ...]:
    """Return the death to count for a member that works on the open segment, or did until it was
    lost."""
    if member not in run.members and member not in run.left:
        return ()
    return (ProcessDied(party=run.party, member=member, segment=run.open_segment),)


def blobs(run: PartyRun) -> frozenset[Digest]:
    """Return the states to return to."""
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
    """Return the phase of the run and that of the party, TRAINING once there is a state, and the
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
