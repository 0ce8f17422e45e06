"""Publishes the progress of runs that count rounds or generations: it changes with their facts."""

from collections.abc import Set

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.state import CoordinatorState, RunPhase, World
from stratagem.coordinator.core.state_machine.strategy_boundary import shown_status_of
from stratagem.coordinator.core.strategy_contract import RunCounts
from stratagem.coordinator.observe.event_feed import Feed, SegmentProgress


def publish_counts(feed: Feed, state: CoordinatorState, world: World, changed: Set[RunId]) -> None:
    """Publish that the counts of these runs are other ones, where they have no steps of their
    own; the numbers themselves are taken from the state."""
    for run_id in changed & state.runs.keys():
        status = shown_status_of(state.runs[run_id], world)
        if status.phase is RunPhase.RUNNING and status.counts.unit != RunCounts().unit:
            feed.set_progress(run_id, SegmentProgress())
