"""Converts state to protobuf messages, for answers. Shows what is; decides nothing."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from stratagem.common.base.ids import Digest, RunId
from stratagem.common.schema.frozen import thawed
from stratagem.common.schema.json_text import dump_json
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import ErrorRecord, Member, Setting
from stratagem.coordinator.core.state import (
    CoordinatorState,
    RunPhase,
    RunRecord,
    WorkerRecord,
    World,
)
from stratagem.coordinator.core.state_machine.run_view import CommitView, RunView
from stratagem.coordinator.core.state_machine.strategy_boundary import status_of
from stratagem.coordinator.observe.event_feed import FeedEvent, SegmentProgress
from stratagem.v1 import coordinator_pb2, types_pb2

Paths = Callable[[Digest], str]
"""Returns where a blob is stored, for display; "" when it is not a file here."""

_PHASES = {phase: coordinator_pb2.RunPhase.Value(f"RUN_PHASE_{phase.value}") for phase in RunPhase}


def run_info(run: RunView, paths: Paths) -> coordinator_pb2.RunInfo:
    """Return one run as a message."""
    return coordinator_pb2.RunInfo(
        run_id=run.run_id,
        name=run.name,
        phase=_PHASES[run.phase],
        reason=run.reason,
        strategy_phase=run.strategy_phase,
        strategy=run.strategy,
        step=run.step,
        num_steps=run.num_steps,
        segment=run.segment,
        num_segments=run.num_segments,
        submitted_at_s=run.submitted_at_s,
        ended_at_s=run.ended_at_s,
        commits=[_commit_info(commit, paths) for commit in run.commits],
        metrics=dict(run.metrics),
        worker_ids=run.worker_ids,
        error=None if run.error is None else _user_error(run.error),
        job_json=run.job_json,
        event_index=max(run.num_facts - 1, 0),
        engine=run.engine,
        reproducible=run.is_reproducible,
        data_plane=run.data_plane,
        submitted_by=run.submitted_by,
    )


def event(item: FeedEvent) -> coordinator_pb2.RunEvent:
    """Return one event as a message."""
    return coordinator_pb2.RunEvent(
        index=item.index,
        time_s=item.wall_s,
        kind=type(item.fact).__name__,
        sentence=sentence(item.fact),
        payload_json=item.fact.model_dump_json(),
        phase=_PHASES[item.phase],
    )


def progress(world: World, run: RunRecord, item: SegmentProgress) -> coordinator_pb2.RunProgress:
    """Return the latest progress of a run as a message."""
    status = status_of(run, world)
    return coordinator_pb2.RunProgress(
        step=max(item.step, status.step),
        num_steps=status.num_steps,
        loss=item.loss,
        rows_per_s=item.rows_per_s,
        num_clients_done=status.num_clients_done,
        num_clients=status.num_clients,
        segment=status.segment,
        num_segments=status.num_segments,
        strategy_phase=status.strategy_phase,
        grad_norm=item.grad_norm,
        num_skipped_steps=item.num_skipped_steps,
        training_phase=item.training_phase,
        metrics=item.metrics,
        reason=item.reason,
    )


def worker_infos(
    state: CoordinatorState, silent_s: Callable[[Member], float | None]
) -> list[coordinator_pb2.WorkerInfo]:
    """Return all workers, by name; silent_s: seconds since a worker's last beat, if it holds a
    lease."""
    runs_of: defaultdict[Member, list[RunId]] = defaultdict(list)
    for run in state.runs.values():
        if run.ended is None:
            for member in run.touched:
                runs_of[member].append(run.run_id)
    workers = sorted(state.workers.values(), key=lambda worker: worker.member.worker_id)
    return [_worker_info(w, silent_s(w.member), runs_of.get(w.member, ())) for w in workers]


def _worker_info(
    worker: WorkerRecord, silent_s: float | None, runs: Sequence[RunId]
) -> coordinator_pb2.WorkerInfo:
    return coordinator_pb2.WorkerInfo(
        worker_id=worker.member.worker_id,
        incarnation=worker.member.incarnation,
        address=worker.address,
        is_alive=worker.is_alive,
        silent_s=silent_s or 0.0,
        capability=types_pb2.Capability(**worker.capability.model_dump()),
        run_ids=runs,
        reason=worker.reason,
    )


def _commit_info(commit: CommitView, paths: Paths) -> coordinator_pb2.CommitInfo:
    return coordinator_pb2.CommitInfo(
        segment=commit.segment,
        step=commit.step,
        digest=commit.digest,
        is_best=commit.is_best,
        is_final=commit.is_final,
        metrics=dict(commit.metrics),
        path=paths(commit.digest),
        member=commit.member,
        schedule=[_setting(setting) for setting in commit.schedule],
    )


def _setting(setting: Setting) -> coordinator_pb2.Hyperparameters:
    values = {name: thawed(value) for name, value in setting.values.items()}
    return coordinator_pb2.Hyperparameters(
        from_step=setting.from_step, values_json=dump_json(values)
    )


def _user_error(error: ErrorRecord) -> types_pb2.UserError:
    return types_pb2.UserError(**error.model_dump())
