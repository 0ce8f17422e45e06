"""Cache the viewed runs for the dashboard: each is read once for all tabs, and kept current.

Reading continues after the last event that was read, and pictures are drawn once for each width
until something new happens. While a long past is being read, the part read so far is drawn.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from stratagem.client.course.step_history import History
from stratagem.client.course.views import RunStatus
from stratagem.client.dashboard.values import WHOLE, CurveView
from stratagem.client.dashboard.watches import RunWatch
from stratagem.client.report.run import ReportedRun, RunCourse, recorded
from stratagem.client.sdk.client import AsyncClient
from stratagem.client.sdk.run import AsyncRun
from stratagem.common.base.errors import NotFoundError

MAX_BOOKS: Final = 32
"""The largest number of cached runs; the least recently used one is dropped."""
MAX_DRAWINGS: Final = 8
"""The largest number of cached drawings per run; each is for one width and view."""
MAX_ROWS: Final = 2048
"""The largest number of rows per curve; a picture has fewer columns of pixels."""
HISTORY_S: Final = 2.0
"""The shortest time between two reads of the step history of an unfinished run."""
PATIENCE_S: Final = 0.8
"""The time after which a run is drawn, even if not all of its events have been read."""
MORE_PATIENCE: Final = 2.5
"""The factor on PATIENCE_S if an older drawing exists, as drawing again pauses the reading."""

T = TypeVar("T")

Draw = Callable[[ReportedRun, int], str]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A cached drawing of a run for a width, with the events and history that it shows."""

    text: str
    num_events: int
    history: object
    made_s: float
    """The time of drawing, by this process's monotonic clock."""


class RunBook:
    """The cached events, history and drawings of one run."""

    def __init__(self, run: AsyncRun, patience_s: float) -> None:
        """Make an empty cache. patience_s: the time after which a run is drawn even if not all of
        its events have been read."""
        self.watch, self._run, self._patience_s = RunWatch(run), run, patience_s
        self._asking, self._taking = asyncio.Lock(), asyncio.Lock()
        """Locks: one drawing at a time; no reading of events while a run is being drawn."""
        self._reader: asyncio.Task[None] | None = None
        self._run_read: ReportedRun | None = None
        self._history, self._num_returns = History(()), 0
        """The step history that was read, and how often the run had returned to a commit then."""
        self._history_s, self._history_index = -HISTORY_S, -1
        """The time of the last reading of the history, by this process's monotonic clock, and the
        index of the newest event then."""
        self._drawn: OrderedDict[tuple[int, CurveView], Drawing] = OrderedDict()
        """The cached drawings, keyed by width and view."""

    async def drawing(self, width: int, draw: Draw, view: CurveView = WHOLE) -> str:
        """Return a drawing of the run as it is now, from the events that can be read in time."""
        key, asked_s = (width, view), time.monotonic()
        async with self._asking:
            drawing = self._drawn.get(key)
            if drawing is not None and self._reader is not None and drawing.made_s >= asked_s:
                return drawing.text  # concurrent callers share one drawing
            times = MORE_PATIENCE if key in self._drawn else 1.0
            run = await self._read_on(times * self._patience_s)
            drawing = self._drawn.get(key)  # empty if another run now has this name
            if drawing is None or not self._is_as_now(drawing, run):
                viewed = await self._with_view(run, view)
                async with self._taking:
                    num_events = run.course.num_events
                    text = await asyncio.to_thread(draw, viewed, width)
                drawing = Drawing(text, num_events, run.history, time.monotonic())
                self._drawn[key] = drawing
                self._drawn.move_to_end(key)
                if len(self._drawn) > MAX_DRAWINGS:
                    self._drawn.popitem(last=False)
            return drawing.text

    async def complete_drawing(self, width: int, draw: Draw) -> str:
        """Return a drawing of the run with all of its events, however long reading them takes."""
        async with self._asking:
            run = await self._read_on(None)
            async with self._taking:
                return await asyncio.to_thread(draw, run, width)

    @staticmethod
    def _is_as_now(drawing: Drawing, run: ReportedRun) -> bool:
        is_same = drawing.num_events == run.course.num_events
        return is_same and drawing.history is run.history

    async def shown(self, patience_s: float | None = None, view: CurveView = WHOLE) -> ReportedRun:
        """Return the run, for immediate use; after patience_s, even with some events unread."""
        async with self._asking:
            return await self._with_view(await self._read_on(patience_s), view)

    async def _with_view(self, run: ReportedRun, view: CurveView) -> ReportedRun:
        """Return the run with a step history of the steps in view only, which is finer."""
        if not view.is_part:
            return run
        first, last = view.first_step, view.last_step
        history = await self._run.history(
            *recorded(run.job), from_step=first, to_step=last, max_rows=MAX_ROWS
        )
        return replace(run, history=history.with_newest_of(self._history))

    def close(self) -> None:
        """Cancel the reading of events."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None

    async def _read_on(self, patience_s: float | None) -> ReportedRun:
        """Continue reading, for at most patience_s; return the run with the events read so far."""
        until_s = None if patience_s is None else time.monotonic() + patience_s
        status, before = await self.watch.status(), self._run_read
        if before is None or before.status.submitted_at_s != status.submitted_at_s:
            self.close()
            self._drawn.clear()
            self._history, self._num_returns = History(()), 0
            self._history_s, self._history_index = -HISTORY_S, -1
            before = ReportedRun(status, RunCourse(status.job))
        self._run_read = replace(before, status=status)
        course = before.course
        self._read_events(course, status)
        self._run_read = replace(self._run_read, history=await self._steps(status, course))
        while self._reader is not None:
            left_s = None if until_s is None else max(until_s - time.monotonic(), 0.0)
            if not (await asyncio.wait({self._reader}, timeout=left_s))[0]:
                break
            self._read_events(course, status)
        if course.num_returns > self._num_returns:
            self._run_read = replace(self._run_read, history=await self._steps(status, course))
        return self._run_read

    def _read_events(self, course: RunCourse, status: RunStatus) -> None:
        """Add the events that the watch has cached; if more exist, keep a task that reads them."""
        if self._reader is not None and self._reader.done():
            reader, self._reader = self._reader, None
            reader.result()
        if self._reader is None:
            course.take(self.watch.events_from(course.num_events))
        if self._reader is None and course.num_events <= status.event_index:
            self._reader = asyncio.create_task(self._take_events(course))
            self._reader.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _take_events(self, course: RunCourse) -> None:
        first = course.num_events
        async for page in self._run.past(first):
            async with self._taking:
                course.take(page)
        if course.num_events == first:
            raise NotFoundError(f"run {self._run.run_id!r} has lost its events")

    async def _steps(self, status: RunStatus, course: RunCourse) -> History:
        """Return the step history; that of an unfinished run may be up to HISTORY_S old."""
        if course.num_returns > self._num_returns:  # steps after the commit are gone
            self._history = History(())
            self._history_s, self._history_index = -HISTORY_S, -1
            self._num_returns = course.num_returns
        now_s, is_over = time.monotonic(), status.phase.is_final
        is_new = status.event_index != self._history_index
        if (is_over and is_new) or (not is_over and now_s - self._history_s >= HISTORY_S):
            self._history = await self._read_steps(status)
            self._history_s, self._history_index = now_s, status.event_index
        return self._history

    async def _read_steps(self, status: RunStatus) -> History:
        """Fetch the step history; final rows are not fetched again until the run ends."""
        wanted, from_step = recorded(status.job), self._history.next_step
        if from_step > 1 and not status.phase.is_final:
            later = await self._run.history(*wanted, from_step=from_step, max_rows=MAX_ROWS)
            whole = self._history.continued(later)
            if all(len(series) <= MAX_ROWS for series in whole.values()):
                return whole
        return await self._run.history(*wanted, max_rows=MAX_ROWS)


class RunBooks:
    """A cache of the most recently viewed runs."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._books: OrderedDict[str, RunBook] = OrderedDict()

    def watch(self, run_id: str) -> RunWatch:
        """Return the watch of any run id. Raises InvalidInputError for an invalid id."""
        return self._book(run_id).watch

    async def status(self, run_id: str) -> RunStatus:
        """Return the status of a run. Raises NotFoundError if it does not exist."""
        return await self._of(run_id, lambda book: book.watch.status())

    async def drawing(self, run_id: str, width: int, draw: Draw, view: CurveView = WHOLE) -> str:
        """Return a run's drawing for a width. Raises NotFoundError if the run does not exist."""
        return await self._of(run_id, lambda book: book.drawing(width, draw, view))

    async def complete_drawing(self, run_id: str, width: int, draw: Draw) -> str:
        """Return a run's drawing with all its events. Raises NotFoundError for an unknown run."""
        return await self._of(run_id, lambda book: book.complete_drawing(width, draw))

    async def partial_runs(
        self, run_ids: Iterable[str], view: CurveView = WHOLE
    ) -> list[ReportedRun]:
        """Return runs with the events read in time. Raises NotFoundError for an unknown run."""
        asked = (self._of(run_id, lambda book: book.shown(PATIENCE_S, view)) for run_id in run_ids)
        return list(await asyncio.gather(*asked))

    def _book(self, run_id: str) -> RunBook:
        book = self._books.get(run_id)
        if book is None:
            book = self._books[run_id] = RunBook(self._client.handle(run_id), PATIENCE_S)
        self._books.move_to_end(run_id)
        unwatched = [id_ for id_, of in self._books.items() if not of.watch.subscription.is_on]
        for old_id in unwatched[: max(len(self._books) - MAX_BOOKS, 0)]:
            if old_id != run_id:
                self._books.pop(old_id).close()
        return book

    async def _of(self, run_id: str, ask: Callable[[RunBook], Awaitable[T]]) -> T:
        book = self._book(run_id)
        try:
            return await ask(book)
        except NotFoundError:
            if self._books.get(run_id) is book:
                self._books.pop(run_id).close()
            raise
