"""Tells watchers of runs without workers what they wait for: nothing else happens to them."""

from collections.abc import Set

from stratagem.common.ids import RunId
from stratagem.coordinator.core.apply import CLUSTER
from stratagem.coordinator.core.asking import why_waiting
from stratagem.coordinator.core.state import CoordinatorState, World
from stratagem.coordinator.watching.feed import Feed, Progress


def say_what_is_missing(
    feed: Feed, state: CoordinatorState, world: World, changed: Set[RunId]
) -> None:
    """After facts of these runs (or of the cluster, which concern all): the sentence as progress,
    when it is another one; and none once there are workers."""
    looked_at = state.runs.keys() if CLUSTER in changed else changed & state.runs.keys()
    for run_id in looked_at:
        run, shown = state.runs[run_id], feed.progress(run_id)
        reason = "" if run.ended is not None else why_waiting(run, world)
        if reason and (shown is None or shown.reason != reason):
            told = Progress(step=0, loss=0.0, rows_per_s=0.0, engine="", reason=reason)
            feed.set_progress(run_id, told)
        elif not reason and shown is not None and shown.reason:
            feed.set_progress(run_id, None)
