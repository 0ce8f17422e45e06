"""The feed gives the watchers of a run its events by index and its latest progress, and wakes them
up for both.

It runs on the event loop and depends on neither gRPC nor the journal. Events are the journaled
facts, so a watcher can leave and come back by index; progress is a latest value without an index.
Memory has only the newest events of runs that have not ended; all others are read on demand. An
archived run has nothing in memory but its present watchers.
"""

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.apply import CLUSTER
from stratagem.coordinator.core.commands import EventSpan
from stratagem.coordinator.core.effect_failures import MAX_TRIES, FailedTries, TryAgain
from stratagem.coordinator.core.effects import Effect
from stratagem.coordinator.core.facts import Fact
from stratagem.coordinator.core.run_view import Pace, epoch_of
from stratagem.coordinator.core.state import CoordinatorState, RunRecord
from stratagem.coordinator.core.strategy_calls import (
    WHY,
    draws_in_secret,
    shown_status_of,
    why_waiting,
)
from stratagem.coordinator.core.strategy_contract import RunCounts, Status
from stratagem.coordinator.core.world import RunPhase, World
from stratagem.coordinator.observe.logs import ids_of

# ---- Events ----


@dataclass(frozen=True, slots=True)
class FeedEvent:
    index: int
    wall_s: float
    fact: Fact
    phase: RunPhase
    leader_s: float = 0.0
    payload: str = ""
    """The fact as JSON, if it was read from the journal; else empty."""

    @property
    def kind(self) -> str:
        return type(self.fact).__name__


@dataclass(frozen=True, slots=True)
class SegmentProgress:
    """The progress of the segment in flight; loss is NaN until the first step."""

    step: int = 0
    loss: float = 0.0
    rows_per_s: float = 0.0
    grad_norm: float = 0.0
    """2-norm of the latest step's gradient before clipping."""
    num_skipped_steps: int = 0
    """Steps skipped since the run began because they were not finite."""
    training_phase: str = ""
    """Name of the current phase of phase training."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The values of the latest step, keyed by metric."""
    lr: float = 0.0
    """The learning rate of the latest step's update; 0: not known."""
    bubble: float | None = None
    """The fraction of a pipeline's latest steps in which its ranks were idle."""
    reason: str = ""
    """The reason why a run waits for workers, why its work keeps failing, or which worker is
    stalled; then no other field is set but step."""


MAX_EVENTS: Final = 1024
"""The number of a run's newest events that are kept in memory whenever there are twice as many."""

PAGE_EVENTS: Final = 100
"""The most events read at once for a watcher. A watcher that does not consume its events keeps them
in memory, about 2 KB each."""
PAGE_BYTES: Final = 2**18
"""The most bytes of payloads read at once, if the sizes of events do not change much."""

History = Callable[[RunId, EventSpan, int], Awaitable[Sequence[FeedEvent]]]
"""A function that returns the first stored events of a span, at most a given number; none if the
run is gone."""


@dataclass(slots=True)
class _Run:
    events: list[FeedEvent] = field(default_factory=list)
    """The newest events; empty once the run has ended."""
    num_events: int = 0
    last_wall_s: float = 0.0
    progress: SegmentProgress | None = None
    trouble: str = ""
    """The sentence about an effect that keeps failing since the newest event."""
    stall: str = ""
    """The sentence about a stalled worker."""
    is_closed: bool = False
    changed: asyncio.Event | None = None
    """The event that is set at the next change; made by the first watcher that waits for one."""

    def with_reason(self, reason: str) -> SegmentProgress:
        """Return a progress that has only a reason and the present number of steps."""
        return SegmentProgress(step=self.progress.step if self.progress else 0, reason=reason)


class Feed:
    def __init__(self, history: History) -> None:
        self._history = history
        self._runs: dict[RunId, _Run] = {}
        self.listeners: list[Callable[[RunId], None]] = []
        """The functions called with each run that has news or is dropped."""

    def add_event(self, run_id: RunId, event: FeedEvent, *, is_last: bool) -> None:
        """Append an event, whose index must be the next one. is_last: the run has ended with it."""
        if run_id not in self._runs:  # it is new, or resumed
            self._runs[run_id] = _Run(num_events=event.index)
        run = self._runs[run_id]
        assert event.index == run.num_events
        run.events.append(event)
        run.num_events += 1
        run.last_wall_s = event.wall_s
        run.is_closed, run.trouble = is_last, ""
        if is_last:
            run.events, run.progress = [], None
        elif len(run.events) > 2 * MAX_EVENTS:
            del run.events[:-MAX_EVENTS]
        self._wake(run_id, run)

    def set_progress(self, run_id: RunId, progress: SegmentProgress | None) -> None:
        """Replace the latest progress, and wake up the watchers."""
        run = self._runs.get(run_id)
        if run is not None and not run.is_closed:
            run.progress = progress
            self._wake(run_id, run)

    def set_trouble(self, run_id: RunId, reason: str, *, is_news: bool) -> None:
        """Set the sentence about repeated failures, valid until the next event. is_news: False if
        only numbers in the sentence have changed, so that watchers are not told."""
        if run_id in self._runs:
            run = self._runs[run_id]
            run.trouble = reason
            if is_news:
                self.set_progress(run_id, run.with_reason(reason))

    def set_stall(self, run_id: RunId, reason: str) -> None:
        """Set the sentence about a stalled worker, or clear it with "". Watchers see it until there
        is progress."""
        run = self._runs.get(run_id)
        if run is None or run.stall == reason:
            return
        before, run.stall = run.stall, reason
        current_reason = run.progress.reason if run.progress is not None else ""
        if reason or (before and current_reason == before):
            self.set_progress(run_id, run.with_reason(reason))

    def trouble(self, run_id: RunId) -> str:
        """Return the sentence about repeated failures or a stalled worker; "" if all is well."""
        run = self._runs.get(run_id)
        return (run.trouble or run.stall) if run else ""

    def progress(self, run_id: RunId) -> SegmentProgress | None:
        """Return the latest progress; None if there is none."""
        run = self._runs.get(run_id)
        return run.progress if run else None

    def last_wall_s(self, run_id: RunId) -> float:
        """Return the wall time of the newest event; 0 before the first."""
        run = self._runs.get(run_id)
        return run.last_wall_s if run else 0.0

    def newest(self, run_id: RunId, is_wanted: Callable[[Fact], bool]) -> Fact | None:
        """Return a run's newest fact in memory for which a condition holds, or None."""
        run = self._runs.get(run_id)
        events = reversed(run.events) if run else ()
        return next((event.fact for event in events if is_wanted(event.fact)), None)

    def forget(self, run_id: RunId) -> None:
        """Drop a run that is archived or deleted; its watchers end after its events."""
        run = self._runs.pop(run_id, None)
        if run is not None:
            run.is_closed = True
        self._wake(run_id, run)

    async def past(
        self, run_id: RunId, span: EventSpan, max_events: int = PAGE_EVENTS
    ) -> AsyncIterator[Sequence[FeedEvent]]:
        """Yield the past events of a span in pages; max_events: the most that are read at once."""
        num_events = min(max_events, PAGE_EVENTS)
        while page := await self._history(run_id, span, num_events):
            yield page
            size = sum(len(event.payload) for event in page)
            fitting = PAGE_BYTES * len(page) // max(size, 1)
            num_events = min(max(fitting, 1), max_events)
            span = span.after(page[-1].index)

    async def watch(
        self, run_id: RunId, span: EventSpan, num_events: int
    ) -> AsyncIterator[FeedEvent | SegmentProgress]:
        """Yield the events of a span without an end, and progress between them, until the run has
        ended; num_events: the number of events so far."""
        run = self._runs.get(run_id) or _Run(num_events=num_events, is_closed=True)
        index = span.from_index
        last_progress: SegmentProgress | None = None
        while True:
            while index < run.num_events:
                first = run.num_events - len(run.events)
                if index < first:
                    asked = replace(span, from_index=index, before_index=first)
                    events = await self._history(run_id, asked, PAGE_EVENTS)
                    if not events and not span.kinds:  # the run was deleted
                        return
                    index = first if not events else index
                else:
                    events = run.events[index - first :]
                for event in events:
                    index = event.index + 1
                    if span.wants(event.kind):
                        yield event
            if run.progress is not None and run.progress is not last_progress:
                last_progress = run.progress
                yield last_progress
            if run.is_closed and index >= run.num_events:
                return
            if index >= run.num_events and (run.progress is None or run.progress is last_progress):
                run.changed = run.changed or asyncio.Event()
                await run.changed.wait()

    def _wake(self, run_id: RunId, run: _Run | None) -> None:
        if run is not None and run.changed is not None:
            run.changed.set()
            run.changed = None
        for listener in self.listeners:
            listener(run_id)


# ---- Briefs of runs ----
#
# Clients that follow all runs get a brief of each run that changes. Each brief is made once for
# all followers, and at most twice a second.

PAUSE_S: Final = 0.5
"""Seconds between two rounds of sending followers the summaries (briefs) of changed runs."""

Brief = TypeVar("Brief")


@dataclass(slots=True, eq=False)
class Follower(Generic[Brief]):
    """A subscriber to all runs, with each run's newest brief (summary) that it has not taken."""

    waiting: dict[RunId, Brief | None] = field(default_factory=dict)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    async def news(self) -> Mapping[RunId, Brief | None]:
        """Wait for changed runs, and return the brief of each; None: the run is gone."""
        await self.has_news.wait()
        self.has_news.clear()
        news, self.waiting = self.waiting, {}
        return news


class RunBriefs(Generic[Brief]):
    """The sender of run summaries (briefs), its followers, and the runs changed since the last."""

    def __init__(
        self,
        brief_of: Callable[[RunId], Awaitable[Brief | None]],
        do: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        """Begin without followers. brief_of: returns the brief of a run, None if the run is gone.
        do: starts a chore under a name."""
        self._brief_of, self._do = brief_of, do
        self._followers: list[Follower[Brief]] = []
        self._changed: dict[RunId, None] = {}
        self._is_telling = False

    def note(self, run_id: RunId) -> None:
        """Record that a run has changed, and have the followers told."""
        if not self._followers:
            return
        self._changed[run_id] = None
        if not self._is_telling:
            self._is_telling = True
            self._do(self._tell(), "tell who follows all runs")

    @contextmanager
    def follower(self) -> Iterator[Follower[Brief]]:
        """Context manager that adds a follower of all runs, and removes it at the end."""
        follower = Follower[Brief]()
        self._followers.append(follower)
        try:
            yield follower
        finally:
            self._followers.remove(follower)

    async def _tell(self) -> None:
        """Send all followers the briefs of changed runs, until a pause passes without changes."""
        try:
            while self._changed and self._followers:
                changed, self._changed = self._changed, {}
                for run_id in changed:
                    brief = await self._brief_of(run_id)
                    for follower in self._followers:
                        follower.waiting[run_id] = brief
                        follower.has_news.set()
                await asyncio.sleep(PAUSE_S)
        finally:
            self._is_telling = False


# ---- Pace of runs ----
#
# The paces of all active runs are measured by the clocks of this process. Progress messages take
# their times from here.

LOOK_PAUSE_S: Final = 0.5
"""The least seconds between two updates of a run's pace, however often it has new progress."""
_BEFORE_TRAINING: Final = ("BUILDING", "WAITING")


@dataclass(frozen=True, slots=True)
class RunTime:
    """The epoch, elapsed time and remaining time of a run."""

    epoch: float
    elapsed_s: float
    eta_s: float | None
    """The remaining seconds; None: not known."""
    may_end_early: bool


class Paces:
    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._paces: dict[RunId, Pace] = {}
        self._looked_s: dict[RunId, float] = {}

    def look(
        self, world: World, run: RunRecord, shown: SegmentProgress | None, *, anew: bool = False
    ) -> None:
        """Update a run's pace from its progress. Do nothing within LOOK_PAUSE_S of the last update,
        unless `anew` is set."""
        now_s, looked_s = self._monotonic(), self._looked_s.get(run.run_id)
        if not anew and looked_s is not None and now_s - looked_s < LOOK_PAUSE_S:
            return
        self._looked_s[run.run_id] = now_s
        status = shown_status_of(run, world)
        step = max(status.step, shown.step if shown else 0)
        trains = status.phase is RunPhase.RUNNING and status.strategy_phase not in _BEFORE_TRAINING
        pace = self._paces.get(run.run_id, Pace())
        done = step + status.counts.part_done
        self._paces[run.run_id] = pace.updated(now_s, done, trains=trains)

    def forget(self, run_id: RunId) -> None:
        """Drop the pace of a run that has ended."""
        self._paces.pop(run_id, None)
        self._looked_s.pop(run_id, None)

    def time_of(self, run: RunRecord, status: Status, step: int) -> RunTime:
        """Return the epoch, elapsed and remaining time of a run that has done so many steps."""
        pace, counts = self._paces.get(run.run_id), status.counts
        may_say = pace is not None and counts.is_even and status.phase is RunPhase.RUNNING
        evaluation = run.job.evaluation
        return RunTime(
            epoch=epoch_of(step, counts.steps_per_epoch),
            elapsed_s=max(self._wall() - run.submitted_wall_s, 0.0),
            eta_s=pace.eta_s(self._monotonic(), status.num_steps) if pace and may_say else None,
            may_end_early=evaluation is not None and evaluation.stop is not None,
        )


# ---- Reasons for waiting ----
#
# If no fact says why a run waits, the reason is published as progress: missing workers, or work
# that fails and is retried.


def with_refused(reason: str, refused: str) -> str:
    """Return why a run waits for workers, with the sentence about refused ones added."""
    return f"{reason}; {refused}" if reason and refused else reason


def say_what_is_missing(
    feed: Feed, state: CoordinatorState, world: World, changed: Set[RunId], refused: str = ""
) -> None:
    """Publish as progress why these runs wait for workers (all runs, if the cluster has changed),
    if the reason is new. Clear it once they have workers, unless work keeps failing or is stalled.
    refused: the sentence about refused workers."""
    looked_at = state.runs.keys() if CLUSTER in changed else changed & state.runs.keys()
    for run_id in looked_at:
        run, latest = state.runs[run_id], feed.progress(run_id)
        reason = "" if run.ended is not None else why_waiting(run, world)
        if reason and draws_in_secret(run.job):
            reason = shown_status_of(run, world).reason
        reason = with_refused(reason, refused)
        if reason and (latest is None or latest.reason != reason):
            feed.set_progress(run_id, SegmentProgress(reason=reason))
        elif not reason and latest is not None and latest.reason not in ("", feed.trouble(run_id)):
            feed.set_progress(run_id, None)


def say_what_fails(feed: Feed, state: CoordinatorState, effect: Effect, tries: FailedTries) -> None:
    """Publish, until the next fact of the run, which effect keeps failing and why, the number of
    tries, and the time of the next try."""
    kind, run = type(effect).__name__, state.runs.get(effect.run_id)
    of_all = f" of {MAX_TRIES}" if tries.retry is TryAgain.LIMITED else ""
    count = (
        f"tried {tries.num_limited if of_all else tries.num}{of_all} times since "
        f"{_moment(tries.since_s)}, next at {_moment(tries.next_s)}"
    )
    if run is not None and draws_in_secret(run.job):
        what = "the training of a client" if kind == "TrainClient" else kind
        text = f"{what} keeps failing and is tried again; {WHY} ({count})"
    else:
        worker_id = ids_of(effect.run_id, effect).get("worker_id", "")
        where = f" on {worker_id}" if worker_id else ""
        log = f"the log of {worker_id or 'the coordinator'} says more"
        text = f"{kind}{where} keeps failing and is tried again: {tries.reason} ({count}; {log})"
    feed.set_trouble(effect.run_id, text, is_news=tries.is_news)


def _moment(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# ---- Counts ----
#
# The progress of runs that count rounds or generations changes with their facts.


def publish_counts(feed: Feed, state: CoordinatorState, world: World, changed: Set[RunId]) -> None:
    """Wake up the watchers of these runs to changed counts, if a run counts rounds or generations;
    the watchers read the counts from the state."""
    for run_id in changed & state.runs.keys():
        status = shown_status_of(state.runs[run_id], world)
        if status.phase is RunPhase.RUNNING and status.counts.unit != RunCounts().unit:
            feed.set_progress(run_id, SegmentProgress())
