"""The effects that a synchronous party needs: the commit that is due, and the segment to train."""

from stratagem.common.base.ids import RunId
from stratagem.common.job import JobSpec
from stratagem.coordinator.core.effects import (
    Build,
    CommitSegment,
    Effect,
    RunSegment,
    UploadCommit,
)
from stratagem.coordinator.core.facts import SKIPPED_STEPS, TRAIN_LOSS, Member
from stratagem.coordinator.core.metric_course import num_lr_reductions
from stratagem.coordinator.strategies.evaluation.commit_metrics import commit_metrics
from stratagem.coordinator.strategies.scheduling.segment_schedule import (
    SegmentSchedule,
    schedule_of,
)
from stratagem.coordinator.strategies.synchronous.segments.synchronous_run import (
    Parts,
    PartyRun,
    SegmentRules,
    are_moved,
    latest_metrics,
    mirrors_of,
    needs_upload,
    one_part,
    stop_reason,
)

MAX_UNCOMMITTED = 2
"""Finished segments whose snapshots may wait for their commit; bounds the workers' memory."""


def pending(
    run_id: RunId, job: JobSpec, run: PartyRun, shape: SegmentRules, horizon: int | None = None
) -> frozenset[Effect]:
    """Return the commit that is due, and the segment to train; before any state, the build."""
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
        kept = tuple(each.digest for each in run.kept)
        effects.add(
            UploadCommit(
                *(run_id, run.party, run.committed.segment, run.membership),
                run.committed,
                run.holders,
                kept,
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
        kept=tuple(each.digest for each in run.kept),
        is_mirrored=shape.fewest_mirrored is not None,
        keeps=run.open_segment % shape.upload_every > 0 and to_step < schedule.num_steps,
    )
