"""The feed of each run for its watchers: events by index, the latest progress, and a wake-up for
both.

Runs on the event loop; knows neither gRPC nor the journal. Events are the journaled facts, so a
watcher can leave and come back by index; progress is a latest value without one. In memory are the
newest events of runs that have not ended; all others are read on demand. Of a run at rest only its
present watchers are in memory.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stratagem.common.base.ids import RunId
from stratagem.coordinator.core.event_span import EventSpan
from stratagem.coordinator.core.facts import Fact
from stratagem.coordinator.core.state import RunPhase


@dataclass(frozen=True, slots=True)
class FeedEvent:
    index: int
    wall_s: float
    fact: Fact
    phase: RunPhase
    leader_s: float = 0.0
    payload: str = ""
    """The fact as JSON, where it was read from the journal; empty where it was not."""

    @property
    def kind(self) -> str:
        return type(self.fact).__name__


@dataclass(frozen=True, slots=True)
class SegmentProgress:
    """Step and loss of the segment in flight; loss is NaN until the first step."""

    step: int = 0
    loss: float = 0.0
    rows_per_s: float = 0.0
    grad_norm: float = 0.0
    """2-norm of the latest step's gradient before clipping."""
    num_skipped_steps: int = 0
    """Steps skipped since the run began, because they were not finite."""
    training_phase: str = ""
    """Name of the current phase of phase training."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values of that step, by metric."""
    lr: float = 0.0
    """Learning rate of that step's update; 0 where it is not known."""
    bubble: float | None = None
    """Of a pipeline: the share of its latest steps in which its ranks did not compute."""
    reason: str = ""
    """Why a run without workers waits, why its work keeps failing, or which worker stays at one
    thing; no other field is set then but step."""


MAX_EVENTS: Final = 1024
"""Events of a run in memory; up to twice as many until they are cut."""

PAGE_EVENTS: Final = 100
"""Events that are read for a watcher at once. One that does not read keeps them, about 2 KB
each."""
PAGE_BYTES: Final = 2**18
"""Of the payloads that are read at once, if those that follow are like those before."""

History = Callable[[RunId, EventSpan, int], Awaitable[Sequence[FeedEvent]]]
"""Returns the first events of a span, so many at most; none when there are none, or the run is
gone."""


@dataclass(slots=True)
class _Run:
    events: list[FeedEvent] = field(default_factory=list)
    """The newest ones; none once the run has ended."""
    num_events: int = 0
    last_wall_s: float = 0.0
    progress: SegmentProgress | None = None
    trouble: str = ""
    """The effect that keeps failing since the newest event, and the reason."""
    stall: str = ""
    """Which worker stays at one thing."""
    is_closed: bool = False
    changed: asyncio.Event | None = None
    """Set at the next change; made by the watcher that waits for it."""

    def said(self, reason: str) -> SegmentProgress:
        """Return the progress that says a reason; the steps that are made stay so."""
        return SegmentProgress(step=self.progress.step if self.progress else 0, reason=reason)


class Feed:
    def __init__(self, history: History) -> None:
        self._history = history
        self._runs: dict[RunId, _Run] = {}
        self.listeners: list[Callable[[RunId], None]] = []
        """Called with every run of which there is something new, or that is dropped."""

    def add_event(self, run_id: RunId, event: FeedEvent, *, is_last: bool) -> None:
        """Append an event; indices are consecutive. is_last: the run has ended with it."""
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
        """Replace the latest progress."""
        run = self._runs.get(run_id)
        if run is not None and not run.is_closed:
            run.progress = progress
            self._wake(run_id, run)

    def set_trouble(self, run_id: RunId, reason: str, *, is_news: bool) -> None:
        """Set what keeps failing, until the next event; watchers see it until there is progress.
        is_news: they are told, who would else read the same sentence with other numbers."""
        if run_id in self._runs:
            run = self._runs[run_id]
            run.trouble = reason
            if is_news:
                self.set_progress(run_id, run.said(reason))

    def set_stall(self, run_id: RunId, reason: str) -> None:
        """Set which worker stays at one thing; "" where none does any more. Watchers see it until
        there is progress."""
        run = self._runs.get(run_id)
        if run is None or run.stall == reason:
            return
        before, run.stall = run.stall, reason
        shown = run.progress.reason if run.progress is not None else ""
        if reason or (before and shown == before):
            self.set_progress(run_id, run.said(reason))

    def trouble(self, run_id: RunId) -> str:
        """Return what keeps failing, and why, or which worker stays at one thing; "" where all is
        well."""
        run = self._runs.get(run_id)
        return (run.trouble or run.stall) if run else ""

    def progress(self, run_id: RunId) -> SegmentProgress | None:
        """Return the latest progress."""
        run = self._runs.get(run_id)
        return run.progress if run else None

    def last_wall_s(self, run_id: RunId) -> float:
        """Return when the newest event happened; 0 before the first."""
        run = self._runs.get(run_id)
        return run.last_wall_s if run else 0.0

    def newest(self, run_id: RunId, is_wanted: Callable[[Fact], bool]) -> Fact | None:
        """Return the newest fact of a run that is wanted, of those in memory."""
        run = self._runs.get(run_id)
        events = reversed(run.events) if run else ()
        return next((event.fact for event in events if is_wanted(event.fact)), None)

    def forget(self, run_id: RunId) -> None:
        """Drop a run that is at rest or deleted; its watchers end, with its events."""
        run = self._runs.pop(run_id, None)
        if run is not None:
            run.is_closed = True
        self._wake(run_id, run)

    async def past(
        self, run_id: RunId, span: EventSpan, max_events: int = PAGE_EVENTS
    ) -> AsyncIterator[Sequence[FeedEvent]]:
        """Yield the events of a span that have happened; max_events: that are read at once."""
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
        """Yield events of a span without an end, and progress between them, until the run has
        ended; num_events: how many there are by now."""
        run = self._runs.get(run_id) or _Run(num_events=num_events, is_closed=True)
        index = span.from_index
        shown: SegmentProgress | None = None
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
            if run.progress is not None and run.progress is not shown:
                shown = run.progress
                yield shown
            if run.is_closed and index >= run.num_events:
                return
            if index >= run.num_events and (run.progress is None or run.progress is shown):
                run.changed = run.changed or asyncio.Event()
                await run.changed.wait()

    def _wake(self, run_id: RunId, run: _Run | None) -> None:
        if run is not None and run.changed is not None:
            run.changed.set()
            run.changed = None
        for listener in self.listeners:
            listener(run_id)
