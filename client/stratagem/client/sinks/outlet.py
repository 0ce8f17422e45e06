"""Send the history of a run to sinks, each from a thread of its own.

New data wake the thread, which fetches the part that the sink lacks. Nothing is queued, and a slow
or failing sink delays neither the run nor other sinks. A failed sink is opened again and continues
after the data that it has.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol, Self

import numpy as np

from stratagem.client.course.step_history import History, StepSeries
from stratagem.client.course.views import Event, Progress, RunStatus, is_of_verifier
from stratagem.client.sdk.blocking import RunHandle
from stratagem.client.sinks.sink import Cursor, RowBlock, Sink, SinkRun
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.history.columns import Columns
from stratagem.common.history.recording import is_of_newest_segment

# ---- Outlet ----

KINDS: Final = (
    *("RunSubmitted", "RunResumed", "MembersFormed", "ModelBuilt"),
    *("SegmentFinished", "SegmentCommitted", "Evaluated", "RoundClosed", "GenerationClosed"),
    "SegmentRefuted",
    *("RunCompleted", "StoppedEarly", "RunFailed", "RunCancelled"),
)
"""The kinds of events that sinks receive."""
INTERVAL_S: Final = 1.0
"""The shortest time between two updates of a sink."""
FIRST_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0
"""The longest pause between two attempts at a failing sink."""


class FollowedHandle(Protocol):
    """The methods of a RunHandle that an outlet uses."""

    def status(self) -> RunStatus: ...

    def watch(
        self, from_index: int = 0, *, kinds: Iterable[str] = (), follow: bool | None = None
    ) -> Iterator[Event | Progress]: ...

    def history(
        self, series: str | Sequence[str] = (), parties: str | Sequence[str] = (), *, from_step: int
    ) -> History: ...


def bring(run: FollowedHandle, sink: Sink, cursor: Cursor, *, is_whole: bool) -> Cursor:
    """Send a sink all events and rows that it lacks; return its new cursor, the position that it
    has.

    is_whole: the run has ended; otherwise steps that share a row with later ones are left out.
    """
    events = run.watch(cursor.event_index + 1, kinds=KINDS, follow=False)
    for event in events:
        if not isinstance(event, Event) or is_of_verifier(event):
            continue
        if _goes_back(event, cursor):
            again = sink.restart()
            if again.event_index < cursor.event_index:
                return bring(run, sink, again, is_whole=is_whole)
        sink.fact(event)
        cursor = replace(cursor, event_index=event.index)
    history = run.history((), ("*",), from_step=_first_step(cursor))
    for series in history.values():
        if is_of_newest_segment(series.party):
            continue  # later segments replace it, so it is not a curve
        block = _lacking(series, cursor, is_whole=is_whole)
        if len(block.columns):
            sink.rows(block)
            steps = {**cursor.steps, block.name: int(block.columns.step[-1])}
            cursor = replace(cursor, steps=steps)
    sink.keep(cursor)
    return cursor


def _goes_back(event: Event, cursor: Cursor) -> bool:
    """Return whether the event makes the run repeat steps of which the sink already has rows."""
    if event.kind != "RunResumed" or event.payload.get("from_segment") is None:
        return False
    return max(cursor.steps.values(), default=0) > int(event.payload.get("step") or 0)


def _first_step(cursor: Cursor) -> int:
    """Return the first step of which a row may be missing in the party that is furthest behind."""
    by_party: dict[str, int] = {}
    for name, step in cursor.steps.items():
        party = name.rpartition("/")[0]
        by_party[party] = max(step, by_party.get(party, 0))
    return min(by_party.values(), default=0) + 1


def _lacking(series: StepSeries, cursor: Cursor, *, is_whole: bool) -> RowBlock:
    step = series.step
    block = RowBlock(series.party, series.name, series.stride, series.observed, series.columns)
    chosen = ~series.provisional & (step > cursor.steps.get(block.name, 0))
    if not is_whole:
        chosen &= step % series.stride == 0
    columns = Columns(*(np.ascontiguousarray(column[chosen]) for column in series.columns.arrays))
    return replace(block, columns=columns)


class Outlet:
    """A thread that keeps one sink up to date with a run until `finish()`; thread-safe."""

    def __init__(
        self, name: str, sink: Sink, run: FollowedHandle, complain: Callable[[str], None]
    ) -> None:
        """Start the thread. name: the sink as the user wrote it. complain: is given the first
        failure, and a refusal by the sink, after which there are no more attempts."""
        self.is_refused = False
        self._name, self._sink, self._run, self._complain = name, sink, run, complain
        self._cursor: Cursor | None = None
        self._woken, self._ending = threading.Event(), threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._serve, name=f"sink {name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Tell the thread that there are new data."""
        self._woken.set()

    def finish(self) -> str:
        """Send the rest, with one more attempt after a failure; return what is wrong, or ""."""
        self._ending.set()
        self._woken.set()
        self._thread.join()
        return self._problem

    def _serve(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            self._woken.wait()
            self._woken.clear()
            is_last = self._ending.is_set()
            self._attempt(is_last=is_last)
            if is_last or self.is_refused:
                return
            if self._problem:
                self._woken.set()
                self._ending.wait(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            else:
                self._ending.wait(INTERVAL_S)
                pause_s = FIRST_PAUSE_S

    def _attempt(self, *, is_last: bool) -> None:
        is_first = not self._problem
        try:
            status = self._run.status()
            if self._cursor is None:
                self._cursor = self._sink.open(_described(status))
            ended = status.phase.is_final
            self._cursor = bring(self._run, self._sink, self._cursor, is_whole=ended)
            self._problem = ""
            if is_last:  # `finish()` may come during an attempt: one more follows then
                self._sink.close()
        except InvalidInputError as error:
            self._problem, self.is_refused = str(error), True
            self._complain(f"{self._name}: {error}; nothing of the run is written there")
        except Exception as error:  # of any kind
            self._problem = f"{type(error).__name__}: {error}"
            self._let_go()
            if is_first:
                self._complain(f"{self._name}: {self._problem}; it is tried again")

    def _let_go(self) -> None:
        self._cursor = None
        try:
            self._sink.close()
        except Exception as error:  # it failed before, and is opened again
            self._problem = f"{self._problem}; {error}"


def _described(status: RunStatus) -> SinkRun:
    return SinkRun(
        run_id=status.run_id,
        name=status.name,
        strategy=status.strategy,
        submitted_at_s=status.submitted_at_s,
        job=status.job,
    )


# ---- Sinks of a run ----
#
# A followed run is logged to its sinks; the end reports any data that are not written.


class LogOutlets:
    """Context manager with an outlet for each sink of a run. On exit it sends the rest, or reports
    what is missing."""

    def __init__(
        self, run: RunHandle, sinks: Mapping[str, Sink], complain: Callable[[str], None]
    ) -> None:
        """Start an outlet for each sink. sinks: keyed by the text that names each. complain: is
        given sentences to show to the user."""
        self._run_id, self._complain = run.run_id, complain
        self._outlets = {text: Outlet(text, sink, run, complain) for text, sink in sinks.items()}
        self.problems: dict[str, str] = {}
        """The reason why a sink is incomplete, keyed by the sink's text."""

    def take(self, item: Event | Progress) -> Event | Progress:
        """Wake the sinks if an item is an event that they receive; return the item."""
        if isinstance(item, Event) and item.kind in KINDS:
            for outlet in self._outlets.values():
                outlet.wake()
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for text, outlet in self._outlets.items():
            if problem := outlet.finish():
                self.problems[text] = problem
                if outlet.is_refused:  # it was reported, and cannot be completed
                    continue
                completed = f'"stratagem export {self._run_id} --to {text}" completes it'
                self._complain(f"{text}: not all is written ({problem}); {completed}")
