"""What watchers see: per run its events by index, the latest progress, and a wake-up for both.

Lives on the event loop; knows neither gRPC nor the journal. Events are the journaled facts, so a
watcher can leave and come back by index; progress is a latest value without one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from stratagem.common.ids import RunId
from stratagem.coordinator.core.facts import Fact
from stratagem.coordinator.core.state import RunPhase


@dataclass(frozen=True, slots=True)
class Event:
    index: int
    wall_s: float
    fact: Fact
    phase: RunPhase


@dataclass(frozen=True, slots=True)
class Progress:
    """step and loss of the segment in flight; loss is NaN until the first step."""

    step: int
    loss: float
    rows_per_s: float
    engine: str
    grad_norm: float = 0.0
    """2-norm of the latest step's gradient before clipping."""
    num_skipped_steps: int = 0
    """In the segment, because they were not finite."""
    training_phase: str = ""
    """Of phase training."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of that step, by metric."""


@dataclass(slots=True)
class _Run:
    events: list[Event] = field(default_factory=list)
    progress: Progress | None = None
    version: int = 0
    is_closed: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Feed:
    def __init__(self) -> None:
        self._runs: dict[RunId, _Run] = {}

    def add_event(self, run_id: RunId, event: Event, *, is_last: bool) -> None:
        """Append an event; indices are consecutive. is_last: the run has ended with it."""
        run = self._runs.setdefault(run_id, _Run())
        assert event.index == len(run.events)
        run.events.append(event)
        run.is_closed = is_last
        self._wake(run)

    def set_progress(self, run_id: RunId, progress: Progress | None) -> None:
        """Replace the latest progress."""
        run = self._runs.get(run_id)
        if run is not None:
            run.progress = progress
            self._wake(run)

    def progress(self, run_id: RunId) -> Progress | None:
        """The latest progress."""
        run = self._runs.get(run_id)
        return run.progress if run else None

    def num_events(self, run_id: RunId) -> int:
        """The index of the next event."""
        run = self._runs.get(run_id)
        return len(run.events) if run else 0

    def last_wall_s(self, run_id: RunId) -> float:
        """When the newest event happened; 0 before the first."""
        run = self._runs.get(run_id)
        return run.events[-1].wall_s if run and run.events else 0.0

    def newest(self, run_id: RunId, is_wanted: Callable[[Fact], bool]) -> Fact | None:
        """The newest fact of a run that is wanted."""
        run = self._runs.get(run_id)
        events = reversed(run.events) if run else ()
        return next((event.fact for event in events if is_wanted(event.fact)), None)

    def forget(self, run_id: RunId) -> None:
        """Drop a deleted run; its watchers end."""
        run = self._runs.pop(run_id, None)
        if run is not None:
            run.is_closed = True
            self._wake(run)

    async def watch(self, run_id: RunId, from_index: int) -> AsyncIterator[Event | Progress]:
        """Events from an index on and progress between them, until the run has ended."""
        run = self._runs[run_id]
        index = from_index
        shown: Progress | None = None
        while True:
            changed = run.changed
            while index < len(run.events):
                index += 1
                yield run.events[index - 1]
            if run.progress is not None and run.progress is not shown:
                shown = run.progress
                yield shown
            if run.is_closed and index >= len(run.events):
                return
            if changed is run.changed:
                await changed.wait()

    def _wake(self, run: _Run) -> None:
        run.changed.set()
        run.changed = asyncio.Event()
