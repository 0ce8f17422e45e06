"""Publishes why a run waits when no fact says it: missing workers, and work that fails and is
retried."""

from collections.abc import Set
from datetime import UTC, datetime

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.effect_failures import MAX_TRIES, FailedTries, TryAgain
from stratagem.coordinator.core.effects import Effect
from stratagem.coordinator.core.secret_draws import WHY, draws_in_secret
from stratagem.coordinator.core.state import CoordinatorState, World
from stratagem.coordinator.core.state_machine.apply import CLUSTER
from stratagem.coordinator.core.state_machine.strategy_boundary import shown_status_of, why_waiting
from stratagem.coordinator.observe.event_feed import Feed, SegmentProgress
from stratagem.coordinator.observe.log_ids import ids_of


def with_refused(reason: str, refused: str) -> str:
    """Return why a run waits for workers, with the sentence about those that were refused."""
    return f"{reason}; {refused}" if reason and refused else reason


def say_what_is_missing(
    feed: Feed, state: CoordinatorState, world: World, changed: Set[RunId], refused: str = ""
) -> None:
    """Publish as progress the sentence about missing workers of these runs (all runs, where the
    cluster changed) when it is another one; clear it once there are workers, but for what keeps
    failing or stays at one thing, which is not over then. refused: the sentence
    about workers that were refused."""
    looked_at = state.runs.keys() if CLUSTER in changed else changed & state.runs.keys()
    for run_id in looked_at:
        run, shown = state.runs[run_id], feed.progress(run_id)
        reason = "" if run.ended is not None else why_waiting(run, world)
        if reason and draws_in_secret(run.job):
            reason = shown_status_of(run, world).reason
        reason = with_refused(reason, refused)
        if reason and (shown is None or shown.reason != reason):
            feed.set_progress(run_id, SegmentProgress(reason=reason))
        elif not reason and shown is not None and shown.reason not in ("", feed.trouble(run_id)):
            feed.set_progress(run_id, None)


def say_what_fails(feed: Feed, state: CoordinatorState, effect: Effect, tries: FailedTries) -> None:
    """Publish, until the next fact of the run, which effect keeps failing and why, how often it was
    tried, and when it is tried next."""
    kind, run = type(effect).__name__, state.runs.get(effect.run_id)
    of_all = f" of {MAX_TRIES}" if tries.retry is TryAgain.LIMITED else ""
    count = (
        f"tried {tries.num_limited if of_all else tries.num}{of_all} times since "
        f"{_moment(tries.since_s)}, next at {_moment(tries.next_s)}"
    )
    if run is not None and draws_in_secret(run.job):
        what = "the training of a client" if kind == "TrainClient" else kind
        told = f"{what} keeps failing and is tried again; {WHY} ({count})"
    else:
        worker_id = ids_of(effect.run_id, effect).get("worker_id", "")
        where = f" on {worker_id}" if worker_id else ""
        log = f"the log of {worker_id or 'the coordinator'} says more"
        told = f"{kind}{where} keeps failing and is tried again: {tries.reason} ({count}; {log})"
    feed.set_trouble(effect.run_id, told, is_news=tries.is_news)


def _moment(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
