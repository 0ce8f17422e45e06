"""Runs at rest: ended, held by no worker, and small until they are resumed or deleted.

A run that comes to rest leaves the state but for what decisions need of every run. What a command
needs beyond that is recalled, by folding the run's own facts again.
"""

from collections.abc import Iterable
from dataclasses import replace

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.commands import Command, ResumeRun, SubmitRun
from stratagem.coordinator.core.facts import Fact
from stratagem.coordinator.core.state import (
    CoordinatorState,
    EndedRun,
    RunPhase,
    RunRecord,
    World,
    initial_of,
)
from stratagem.coordinator.core.state_machine.apply import apply, without
from stratagem.coordinator.core.state_machine.pending_effects import blobs_of
from stratagem.coordinator.core.state_machine.run_view import RunView, view_of
from stratagem.coordinator.core.strategy_table import MISSING


def at_rest(world: World, run: RunRecord, last_wall_s: float) -> tuple[EndedRun, RunView] | None:
    """What stays of a run at rest, and how it is shown; last_wall_s is when it came to rest.

    None for a run that is not, or whose facts another version of its strategy, or the strategy's
    return, may yet read otherwise.
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
        submission=run.submission,
    )
    return ended, view


def put_to_rest(state: CoordinatorState, runs: Iterable[EndedRun]) -> CoordinatorState:
    """The state with only this left of these runs."""
    ended = {run.run_id: run for run in runs}
    if not ended:
        return state
    left = {run_id: run for run_id, run in state.runs.items() if run_id not in ended}
    return replace(state, runs=left, ended={**state.ended, **ended})


def num_to_recall(state: CoordinatorState, command: Command) -> tuple[RunId, int] | None:
    """The run at rest that decide needs to be recalled, and how many facts of it, from the first
    one on."""
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
    """The state with a run as these facts tell of it, each with its leader-clock time."""
    alone = CoordinatorState(state.strategies)
    for fact, time_s in facts:
        alone = apply(alone, run_id, fact, time_s)
    return replace(state, runs={**state.runs, **alone.runs}, ended=without(state.ended, run_id))
