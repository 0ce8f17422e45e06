"""Converts state to protobuf messages, for answers. Shows what is; decides nothing."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from stratagem.common.base.ids import Digest, RunId
from stratagem.common.schema.json import dump_json, thawed
from stratagem.coordinator.core.fact_messages import sentence
from stratagem.coordinator.core.facts import Member, Setting
from stratagem.coordinator.core.secret_draws import draws_in_secret
from stratagem.coordinator.core.state import (
    CoordinatorState,
    RunPhase,
    RunRecord,
    WorkerRecord,
    World,
)
from stratagem.coordinator.core.state_machine.run_view import CommitView, RunView
from stratagem.coordinator.core.state_machine.strategy_boundary import shown_status_of
from stratagem.coordinator.observe.event_feed import FeedEvent, SegmentProgress
from stratagem.coordinator.observe.run_paces import Paces
from stratagem.coordinator.runtime.rendezvous import Arrival
from stratagem.v1 import coordinator_pb2, types_pb2

Paths = Callable[[Digest], str]
"""Returns where a blob is stored, for display; "" when it is not a file here."""

_IN_BRIEF = {
    field.name
    for field in coordinator_pb2.RunBrief.DESCRIPTOR.fields
    if field.name in RunView.model_fields and field.name != "phase"
}
_PHASES = {phase: coordinator_pb2.RunPhase.Value(f"RUN_PHASE_{phase.value}") for phase in RunPhase}


def run_info(run: RunView, paths: Paths, *, pinned: bool) -> coordinator_pb2.RunInfo:
    """Return one run as a message."""
    # What has the same name in both is taken as it is.
    same = run.model_dump(exclude={"predictions", "num_facts", "is_reproducible"})
    changed = {
        "phase": _PHASES[run.phase],
        "commits": [_commit_info(commit, paths) for commit in run.commits],
        "event_index": max(run.num_facts - 1, 0),
        "reproducible": run.is_reproducible,
        "pinned": pinned,
    }
    return coordinator_pb2.RunInfo(**same | changed)


def event(item: FeedEvent) -> coordinator_pb2.RunEvent:
    """Return one event as a message."""
    return coordinator_pb2.RunEvent(
        index=item.index,
        time_s=item.wall_s,
        kind=type(item.fact).__name__,
        sentence=sentence(item.fact),
        payload_json=item.payload or item.fact.model_dump_json(),
        phase=_PHASES[item.phase],
        leader_s=item.leader_s,
    )


def progress(
    paces: Paces, world: World, run: RunRecord, item: SegmentProgress
) -> coordinator_pb2.RunProgress:
    """Return the latest progress of a run as a message."""
    status = shown_status_of(run, world)
    counts, step = status.counts, max(item.step, status.step)
    return coordinator_pb2.RunProgress(
        **asdict(item) | {"step": step, "loss": item.loss or counts.loss},
        **asdict(paces.time_of(run, status, step)),
        num_steps=status.num_steps,
        num_clients_done=status.num_clients_done,
        num_clients=status.num_clients,
        segment=status.segment,
        num_segments=status.num_segments,
        strategy_phase=status.strategy_phase,
        unit=counts.unit,
        num_clients_rejected=counts.num_clients_rejected,
        num_clients_late=counts.num_clients_late,
        best=counts.best,
        best_member=counts.best_member,
        num_copied=counts.num_copied,
    )


def run_brief(run: RunView, latest: coordinator_pb2.RunProgress | None) -> coordinator_pb2.RunBrief:
    """Return what a list of runs shows of one."""
    same = run.model_dump(include=_IN_BRIEF)
    return coordinator_pb2.RunBrief(
        **same,
        phase=_PHASES[run.phase],
        event_index=max(run.num_facts - 1, 0),
        progress=latest,
    )


def worker_infos(
    state: CoordinatorState,
    workers: Sequence[WorkerRecord],
    silent_s: Callable[[WorkerRecord], float],
) -> Iterator[coordinator_pb2.WorkerInfo]:
    """Yield these workers as messages; silent_s: seconds since a worker was heard of."""
    runs_of: defaultdict[Member, list[RunId]] = defaultdict(list)
    asked = frozenset(worker.member for worker in workers)
    for run in state.runs.values():
        if run.ended is None and not draws_in_secret(run.job):
            for member in run.touched & asked:
                runs_of[member].append(run.run_id)
    for worker in workers:
        yield _worker_info(worker, silent_s(worker), runs_of.get(worker.member, ()))


def _worker_info(
    worker: WorkerRecord, silent_s: float, runs: Sequence[RunId]
) -> coordinator_pb2.WorkerInfo:
    return coordinator_pb2.WorkerInfo(
        **worker.member.model_dump(),
        address=worker.address,
        is_alive=worker.is_alive,
        silent_s=silent_s,
        capability=types_pb2.Capability(**worker.capability.model_dump()),
        run_ids=runs,
        reason=worker.reason,
    )


def met(arrivals: Sequence[Arrival]) -> coordinator_pb2.RendezvousResponse:
    """Return what the members of a party are answered once all have arrived."""
    members = [
        coordinator_pb2.RendezvousMember(
            endpoint=each.endpoint,
            applied_step=each.applied_step,
            address=each.address,
            slices=each.slices,
        )
        for each in arrivals
    ]
    return coordinator_pb2.RendezvousResponse(members=members)


def _commit_info(commit: CommitView, paths: Paths) -> coordinator_pb2.CommitInfo:
    same = commit.model_dump(exclude={"schedule"})
    schedule = [_setting(setting) for setting in commit.schedule]
    return coordinator_pb2.CommitInfo(**same, path=paths(commit.digest), schedule=schedule)


def _setting(setting: Setting) -> coordinator_pb2.Hyperparameters:
    values = {name: thawed(value) for name, value in setting.values.items()}
    return coordinator_pb2.Hyperparameters(
        from_step=setting.from_step, values_json=dump_json(values)
    )
