"""The view of a run that is shown to people, as a value: derived from the state while the run is
active, and stored when it is archived."""

from stratagem.common.base.ids import Digest, RunId
from stratagem.common.strategy import describe
from stratagem.coordinator.core.facts import (
    ErrorRecord,
    Fact,
    Metrics,
    RunCancelled,
    RunCompleted,
    RunFailed,
    Setting,
    Value,
)
from stratagem.coordinator.core.state import (
    CommittedState,
    EndedRun,
    RunPhase,
    RunRecord,
    World,
    best_commit,
    retained,
)
from stratagem.coordinator.core.state_machine.strategy_boundary import shown_status_of
from stratagem.coordinator.core.strategy_contract import Status


class CommitView(Value):
    """The view of a commit that is kept."""

    segment: int
    step: int
    digest: Digest
    is_best: bool
    is_final: bool
    metrics: Metrics
    member: int | None = None
    """For a population: the member whose state it is."""
    schedule: tuple[Setting, ...] = ()
    """For a population: the settings that the state was trained with; see Origin."""
    average: Digest = Digest("")
    """The state of averaged parameters beside it, in a federation that keeps one."""


class RunView(Value):
    """The view of one run; its fields are those of stratagem.v1.RunInfo."""

    run_id: RunId
    name: str
    phase: RunPhase
    reason: str
    strategy_phase: str
    strategy: str
    step: int
    num_steps: int
    segment: int
    num_segments: int
    submitted_at_s: float
    ended_at_s: float
    commits: tuple[CommitView, ...]
    metrics: Metrics
    predictions: Digest | None
    worker_ids: tuple[str, ...]
    error: ErrorRecord | None
    job_json: str
    num_facts: int
    """Those that readers get."""
    engine: str
    is_reproducible: bool
    data_plane: str
    submitted_by: str


def view_of(world: World, run: RunRecord, last_wall_s: float) -> RunView:
    """Return the view of one run; last_wall_s is the wall time of its newest event."""
    status = shown_status_of(run, world)
    return RunView(
        run_id=run.run_id,
        name=run.job.name,
        phase=run.ended or status.phase,
        reason=run.reason if run.ended else status.reason,
        strategy_phase="" if run.ended else status.strategy_phase,
        strategy=describe(run.job.strategy),
        step=status.step,
        num_steps=status.num_steps,
        segment=status.segment,
        num_segments=status.num_segments,
        submitted_at_s=run.submitted_wall_s,
        ended_at_s=last_wall_s if run.ended else 0.0,
        commits=_commits(run, status),
        metrics=run.metrics,
        predictions=run.predictions,
        worker_ids=() if run.ended else tuple(member.worker_id for member in status.members),
        error=run.error,
        job_json=run.job.canonical_json(),
        num_facts=run.num_shown,
        engine=run.engine,
        is_reproducible=run.is_reproducible,
        data_plane=_data_plane(world, status),
        submitted_by=run.submitted_by,
    )


def phase_of(world: World, run: RunRecord | EndedRun) -> RunPhase:
    """Return the phase of a run: how it ended, else what its strategy says."""
    if isinstance(run, EndedRun):
        return run.ended
    return run.ended or shown_status_of(run, world).phase


def phase_then(fact: Fact) -> RunPhase:
    """Return the phase of a run after an old fact of it, as far as the fact alone determines it."""
    match fact:
        case RunCompleted():
            return RunPhase.COMPLETED
        case RunFailed():
            return RunPhase.FAILED
        case RunCancelled():
            return RunPhase.CANCELLED
        case _:
            return RunPhase.RUNNING


def _commits(run: RunRecord, status: Status) -> tuple[CommitView, ...]:
    best, origins = best_commit(run), status.origins

    def shown(commit: CommittedState) -> CommitView:
        origin = origins.get(commit.segment)
        return CommitView(
            segment=commit.segment,
            step=commit.step,
            digest=commit.digest,
            is_best=commit == best,
            is_final=run.ended is RunPhase.COMPLETED and commit == run.commits[-1],
            metrics=commit.metrics,
            member=None if origin is None else origin.member,
            schedule=() if origin is None else origin.schedule,
            average=commit.average,
        )

    return tuple(map(shown, retained(run)))


def _data_plane(world: World, status: Status) -> str:
    """Return the transport security of the workers that a run has now: tls only if all report
    it."""
    workers = [world.workers.get(member.worker_id) for member in status.members]
    said = {"" if worker is None else worker.capability.data_plane for worker in workers}
    return said.pop() if len(said) == 1 else "trusted" if said else ""
