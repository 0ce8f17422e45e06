"""State as protobuf, for answers. Shows what is; decides nothing."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stratagem.common.errors import InvalidInputError
from stratagem.common.ids import Digest, RunId, check_run_id
from stratagem.common.strategy import describe
from stratagem.coordinator.core.asking import outlook_of
from stratagem.coordinator.core.facts import (
    Capability,
    ErrorRecord,
    Fact,
    Member,
    RunCancelled,
    RunCompleted,
    RunFailed,
)
from stratagem.coordinator.core.sentences import sentence
from stratagem.coordinator.core.state import (
    Commit,
    CoordinatorState,
    RunPhase,
    RunRecord,
    WorkerRecord,
    World,
    best_commit,
    retained,
)
from stratagem.coordinator.strategies.contract import Outlook
from stratagem.coordinator.watching.feed import Event, Progress
from stratagem.v1 import coordinator_pb2, types_pb2

MAX_PAGE_BYTES: Final = 2 * 2**20
"""Of a page with several runs; one alone is never larger than a message."""

Paths = Callable[[Digest], str]
"""Where a blob lies, for people; "" when it is not a file here."""

_PHASES = {phase: coordinator_pb2.RunPhase.Value(f"RUN_PHASE_{phase.value}") for phase in RunPhase}


def phase_of(world: World, run: RunRecord) -> RunPhase:
    """The phase of a run: how it ended, else what its strategy says."""
    return run.ended or outlook_of(run, world).phase


def phase_then(fact: Fact) -> RunPhase:
    """The phase of a run after an old fact of it, as far as the fact itself tells."""
    match fact:
        case RunCompleted():
            return RunPhase.COMPLETED
        case RunFailed():
            return RunPhase.FAILED
        case RunCancelled():
            return RunPhase.CANCELLED
        case _:
            return RunPhase.RUNNING


def run_info(
    world: World, run: RunRecord, paths: Paths, last_wall_s: float
) -> coordinator_pb2.RunInfo:
    """One run; last_wall_s is when its newest event happened."""
    outlook = outlook_of(run, world)
    return coordinator_pb2.RunInfo(
        run_id=run.run_id,
        name=run.job.name,
        phase=_PHASES[run.ended or outlook.phase],
        reason=run.reason if run.ended else outlook.reason,
        strategy_phase="" if run.ended else outlook.strategy_phase,
        strategy=describe(run.job.strategy),
        step=outlook.step,
        num_steps=outlook.num_steps,
        segment=outlook.segment,
        num_segments=outlook.num_segments,
        submitted_at_s=run.submitted_wall_s,
        ended_at_s=last_wall_s if run.ended else 0.0,
        commits=[_commit_info(run, commit, paths) for commit in retained(run)],
        metrics=dict(run.metrics),
        worker_ids=[] if run.ended else [member.worker_id for member in outlook.members],
        error=None if run.error is None else _user_error(run.error),
        job_json=run.job.canonical_json(),
        event_index=max(run.num_facts - 1, 0),
        engine=run.engine,
        reproducible=run.is_reproducible,
        data_plane=_data_plane(world, outlook),
        submitted_by=run.submitted_by,
    )


def page_of(
    runs: Iterable[RunRecord],
    page_token: str,
    info_of: Callable[[RunRecord], coordinator_pb2.RunInfo],
) -> coordinator_pb2.ListRunsResponse:
    """The runs behind the token, newest first, as many as fit into one message.

    The token is the place of the last run of a page, so that one that is deleted does no harm.
    """
    ordered = sorted(runs, key=_place)
    behind = _place_in(page_token) if page_token else None
    response = coordinator_pb2.ListRunsResponse()
    num_bytes = 0
    for run in ordered:
        if behind is not None and _place(run) <= behind:
            continue
        info = info_of(run)
        num_bytes += info.ByteSize()
        if response.runs and num_bytes > MAX_PAGE_BYTES:
            last = response.runs[-1]
            response.next_page_token = f"{last.submitted_at_s!r} {last.run_id}"
            return response
        response.runs.append(info)
    return response


def _place(run: RunRecord) -> tuple[float, str]:
    return -run.submitted_wall_s, run.run_id


def _place_in(page_token: str) -> tuple[float, str]:
    wall_s, _, run_id = page_token.partition(" ")
    try:
        return -float(wall_s), check_run_id(run_id)
    except ValueError:
        text = f"{page_token[:80]!r} is not from an earlier answer"
        raise InvalidInputError.at("page_token", text) from None


def event(item: Event) -> coordinator_pb2.RunEvent:
    """One event."""
    return coordinator_pb2.RunEvent(
        index=item.index,
        time_s=item.wall_s,
        kind=type(item.fact).__name__,
        sentence=sentence(item.fact),
        payload_json=item.fact.model_dump_json(),
        phase=_PHASES[item.phase],
    )


def progress(world: World, run: RunRecord, item: Progress) -> coordinator_pb2.RunProgress:
    """The latest progress."""
    outlook = outlook_of(run, world)
    return coordinator_pb2.RunProgress(
        step=max(item.step, outlook.step),
        num_steps=outlook.num_steps,
        loss=item.loss,
        rows_per_s=item.rows_per_s,
        num_clients_done=outlook.num_clients_done,
        num_clients=outlook.num_clients,
        segment=outlook.segment,
        num_segments=outlook.num_segments,
        strategy_phase=outlook.strategy_phase,
        grad_norm=item.grad_norm,
        num_skipped_steps=item.num_skipped_steps,
        training_phase=item.training_phase,
        metrics=item.metrics,
        reason=item.reason,
    )


def worker_infos(
    state: CoordinatorState, silent_s: Callable[[Member], float | None]
) -> list[coordinator_pb2.WorkerInfo]:
    """All workers, by name; silent_s: seconds since the last beat of one, if it holds a lease."""
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


def capability(proto: types_pb2.Capability) -> Capability:
    """What a worker says of itself."""
    return Capability(
        device=proto.device,
        device_name=proto.device_name,
        memory_bytes=proto.memory_bytes,
        num_threads=proto.num_threads,
        numerics_fingerprint=proto.numerics_fingerprint,
        numerics_description=proto.numerics_description,
        local_data=tuple(proto.local_data),
        tags=tuple(proto.tags),
        data_plane=proto.data_plane,
    )


def _data_plane(world: World, outlook: Outlook) -> str:
    """Of the workers that a run has now: tls only if all of them say so."""
    workers = [world.workers.get(member.worker_id) for member in outlook.members]
    said = {"" if worker is None else worker.capability.data_plane for worker in workers}
    return said.pop() if len(said) == 1 else "trusted" if said else ""


def _commit_info(run: RunRecord, commit: Commit, paths: Paths) -> coordinator_pb2.CommitInfo:
    return coordinator_pb2.CommitInfo(
        segment=commit.segment,
        step=commit.step,
        digest=commit.digest,
        is_best=commit == best_commit(run),
        is_final=run.ended is RunPhase.COMPLETED and commit == run.commits[-1],
        metrics=dict(commit.metrics),
        path=paths(commit.digest),
    )


def _user_error(error: ErrorRecord) -> types_pb2.UserError:
    return types_pb2.UserError(**error.model_dump())
