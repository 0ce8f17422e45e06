"""Archiving of ended runs: held by no worker, and kept small until they are resumed or deleted.

Of an archived run the state keeps only what decisions need of every run. What a command needs
beyond that is recalled, by folding the run's own facts again.
"""

from collections.abc import Iterable
from dataclasses import replace

from stratagem.common.base.ids import Digest, RunId
from stratagem.coordinator.core.commands import Command, ResumeRun, SubmitRun
from stratagem.coordinator.core.facts import Fact
from stratagem.coordinator.core.secret_draws import draws_in_secret
from stratagem.coordinator.core.state import (
    CoordinatorState,
    EndedRun,
    RunPhase,
    RunRecord,
    World,
    initial_of,
)
from stratagem.coordinator.core.state_machine.apply import apply
from stratagem.coordinator.core.state_machine.pending_effects import blobs_of
from stratagem.coordinator.core.state_machine.run_view import RunView, view_of
from stratagem.coordinator.core.strategy_table import MISSING


def at_rest(world: World, run: RunRecord, last_wall_s: float) -> tuple[EndedRun, RunView] | None:
    """Return the summary and the view of a run that can be archived; last_wall_s is the wall time
    of its last event.

    Return None for a run that has not ended or is still held by workers, and for one whose facts
    another version of its strategy, or the strategy's return, may yet read otherwise.
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
    """Return the states that a view shows, and the predictions."""
    named = {digest for each in view.commits for digest in (each.digest, each.average)}
    return {*named, view.predictions or Digest("")} - {Digest("")}


def put_to_rest(state: CoordinatorState, runs: Iterable[EndedRun]) -> CoordinatorState:
    """Replace these runs in the state by their summaries."""
    ended = {run.run_id: run for run in runs}
    if not ended:
        return state
    left = {run_id: run for run_id, run in state.runs.items() if run_id not in ended}
    return replace(state, runs=left, ended=state.ended.with_runs(ended.values()))


def num_to_recall(state: CoordinatorState, command: Command) -> tuple[RunId, int] | None:
    """Return the archived run that decide needs to be recalled for a command, and how many of its
    facts, from the first one on; None when it needs none."""
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
    """Return the state with a run rebuilt from these facts, each with its leader-clock time."""
    alone = CoordinatorState(state.strategies)
    for fact, time_s in facts:
        alone = apply(alone, run_id, fact, time_s)
    return replace(state, runs={**state.runs, **alone.runs}, ended=state.ended.without(run_id))
