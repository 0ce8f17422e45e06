"""Derive the view of a run for users, its remaining time, and its archived form.

The view is a value. It is derived from the state while the run is active, and stored when the run
is archived.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from stratagem.common.base.ids import Digest, RunId
from stratagem.common.strategy import describe
from stratagem.coordinator.core.apply import apply
from stratagem.coordinator.core.commands import Command, ResumeRun, SubmitRun
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
from stratagem.coordinator.core.pending import blobs_of
from stratagem.coordinator.core.state import (
    CommittedState,
    CoordinatorState,
    EndedRun,
    RunRecord,
    best_commit,
    initial_of,
    retained,
)
from stratagem.coordinator.core.strategy_calls import draws_in_secret, shown_status_of
from stratagem.coordinator.core.strategy_contract import MISSING, Status
from stratagem.coordinator.core.world import RunPhase, World

# ---- View ----


class CommitView(Value):
    """The view of a commit that is kept."""

    segment: int
    step: int
    digest: Digest
    is_best: bool
    is_final: bool
    metrics: Metrics
    member: int | None = None
    """The member of a population that the state belongs to."""
    schedule: tuple[Setting, ...] = ()
    """The settings with which a member of a population was trained; see Origin."""
    average: Digest = Digest("")
    """The state of averaged parameters that belongs to it, in a federation that keeps one."""


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
    """The number of facts that readers get."""
    engine: str
    is_reproducible: bool
    data_plane: str
    submitted_by: str
    verification: str = ""


def view_of(world: World, run: RunRecord, last_wall_s: float) -> RunView:
    """Return the view of one run; last_wall_s: the wall time of its newest event."""
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
        verification=status.extra.get("verification", ""),
    )


def phase_of(world: World, run: RunRecord | EndedRun) -> RunPhase:
    """Return the phase of a run: the way it has ended, or the phase that its strategy reports."""
    if isinstance(run, EndedRun):
        return run.ended
    return run.ended or shown_status_of(run, world).phase


def phase_then(fact: Fact) -> RunPhase:
    """Return the phase of a run just after an old fact, as far as that fact alone determines it."""
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

    def view(commit: CommittedState) -> CommitView:
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

    return tuple(map(view, retained(run)))


def _data_plane(world: World, status: Status) -> str:
    """Return the transport security between the run's workers, if all present ones report the same;
    "trusted" if they differ, "" if there are none."""
    workers = [world.workers.get(member.worker_id) for member in status.members]
    said = {"" if worker is None else worker.capability.data_plane for worker in workers}
    return said.pop() if len(said) == 1 else "trusted" if said else ""


# ---- Pace and remaining time ----
#
# The pace is measured over a window of the run's progress, without a separate clock.

WINDOW_S: Final = 60.0
"""Seconds of training over which the pace is measured."""
MIN_SPAN_S: Final = 10.0
"""Seconds of training after the first step before there is a pace at all: loading and compiling
make that step slower than the others."""
MIN_MARKS: Final = 3
"""The least number of marks to keep, however old, as a round may exceed the window."""
MIN_MARK_GAP_S: Final = 0.25
"""Seconds of training between two marks; a mark that comes sooner replaces the one before."""


@dataclass(frozen=True, slots=True)
class PaceMark:
    """A point in a run's progress: the seconds trained so far, and the amount done."""

    trained_s: float
    done: float


@dataclass(frozen=True, slots=True)
class Pace:
    """The progress of a run over the last minute of training, to estimate the remaining time; time
    in which the run does not train does not count."""

    trained_s: float = 0.0
    """Seconds of training until the last update."""
    seen_s: float | None = None
    """The clock at the last update; None while the run does not train."""
    marks: tuple[PaceMark, ...] = ()

    def updated(self, now_s: float, done: float, *, trains: bool) -> "Pace":
        """Return the pace after another look at the run. done: the run's progress, in steps or
        other units and fractions of them; if it decreases, the pace begins anew."""
        if not trains:
            return replace(self, seen_s=None)
        trained_s = self._trained_s(now_s)
        marks = self.marks
        if marks and done < marks[-1].done:
            marks = ()
        if not marks or done > marks[-1].done:
            if len(marks) > 1 and trained_s - marks[-2].trained_s < MIN_MARK_GAP_S:
                marks = marks[:-1]
            marks = (*marks, PaceMark(trained_s, done))
        while len(marks) > MIN_MARKS and marks[1].trained_s <= trained_s - WINDOW_S:
            marks = marks[1:]
        return Pace(trained_s, now_s, marks)

    def eta_s(self, now_s: float, total: float) -> float | None:
        """Return the seconds left until `total` is done; None while the run does not train, and
        before there is a pace."""
        if self.seen_s is None or not self.marks:
            return None
        first, *others = self.marks
        last = self.marks[-1]
        if first.done == 0 and len(others) > 1:
            first = others[0]
        elif first.done == 0 and self._trained_s(now_s) - last.trained_s < MIN_SPAN_S:
            return None
        span_s, gained = self._trained_s(now_s) - first.trained_s, last.done - first.done
        if span_s < MIN_SPAN_S or gained <= 0 or total <= 0:
            return None
        return max(total - last.done, 0.0) * span_s / gained

    def _trained_s(self, now_s: float) -> float:
        return self.trained_s + (0.0 if self.seen_s is None else max(now_s - self.seen_s, 0.0))


def epoch_of(step: int, steps_per_epoch: int) -> float:
    """Return the number of passes over the rows after a step; 0 if steps_per_epoch is not known."""
    return step / steps_per_epoch if steps_per_epoch else 0.0


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Return the number of steps of one pass over the rows; 0 if the rows are not counted."""
    return ceil(num_rows / batch_size)


# ---- Archived runs ----
#
# No worker holds an archived run. The state keeps only the part of it that decisions need. If a
# command needs more, the run is recalled by folding its facts again.


def at_rest(world: World, run: RunRecord, last_wall_s: float) -> tuple[EndedRun, RunView] | None:
    """Return the summary and the view of a run to be archived; None if it cannot be. last_wall_s:
    the wall time of its last event.

    A run cannot be archived if it has not ended, is still held by workers, or has facts that may
    fold to another state once its strategy is installed again or replaced.
    """
    if run.ended is None or not run.is_released or run.has_raised or run.strategy is MISSING:
        return None
    try:
        blobs, view = blobs_of(run), view_of(world, run, last_wall_s)
    except Exception:  # the border to plug-ins
        return None
    ended = EndedRun(
        run_id=run.run_id,
        ended=run.ended,
        num_facts=run.num_facts,
        submitted_wall_s=run.submitted_wall_s,
        submitted_by=run.submitted_by,
        blobs=tuple(sorted(blobs)),
        owner=run.owner,
        ended_s=run.changed_s,
        initial=initial_of(run),
        states=tuple(sorted(_states_in(view))),
        submission=run.submission,
        num_hidden=run.num_hidden,
        draws_in_secret=draws_in_secret(run.job),
    )
    return ended, view


def _states_in(view: RunView) -> set[Digest]:
    """Return the digests of all committed states and predictions in a run's view."""
    named = {digest for commit in view.commits for digest in (commit.digest, commit.average)}
    return {*named, view.predictions or Digest("")} - {Digest("")}


def put_to_rest(state: CoordinatorState, runs: Iterable[EndedRun]) -> CoordinatorState:
    """Return the state with these runs archived: replaced by their summaries."""
    ended = {run.run_id: run for run in runs}
    if not ended:
        return state
    active = {run_id: run for run_id, run in state.runs.items() if run_id not in ended}
    return replace(state, runs=active, ended=state.ended.with_runs(ended.values()))


def num_to_recall(state: CoordinatorState, command: Command) -> tuple[RunId, int] | None:
    """Return the archived run that `decide` needs for a command, and how many of its facts to read,
    from the first one on; None if it needs none."""
    if not isinstance(command, SubmitRun | ResumeRun):
        return None
    run = state.ended.get(command.run_id)
    if run is None:
        return None
    if isinstance(command, SubmitRun):  # is the job the same?
        return run.run_id, 1
    return None if run.ended is RunPhase.COMPLETED else (run.run_id, run.num_facts)


def recall(
    state: CoordinatorState, run_id: RunId, facts: Iterable[tuple[Fact, float]]
) -> CoordinatorState:
    """Return the state with an archived run rebuilt from its facts and their leader-clock times."""
    alone = CoordinatorState(state.strategies)
    for fact, time_s in facts:
        alone = apply(alone, run_id, fact, time_s)
    return replace(state, runs={**state.runs, **alone.runs}, ended=state.ended.without(run_id))
