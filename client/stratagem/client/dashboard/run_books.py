"""What the page knows of the runs that are looked at: read once for all tabs, and read on.

A run's events are read from where they were left, and its pictures drawn once for each width, until
something more happens.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from stratagem.client.report.lines import RECORDED
from stratagem.client.report.run_course import RunCourse
from stratagem.client.report.run_values import ReportedRun
from stratagem.client.sdk.async_client import AsyncClient, AsyncRun
from stratagem.client.sdk.views import Event, RunStatus
from stratagem.common.base.errors import NotFoundError

MAX_BOOKS: Final = 32
"""Runs that are known at once; the one that was asked for least recently is read anew."""
MAX_WIDTHS: Final = 8
"""For which the pictures of one run are kept."""
MAX_ROWS: Final = 2048
"""Of a curve, more than a picture has columns."""
HISTORY_S: Final = 1.0
"""Between two readings of the steps of a run that goes on."""

T = TypeVar("T")

Draw = Callable[[ReportedRun, int], str]


class RunBook:
    """One run, as far as it was read."""

    def __init__(self, run: AsyncRun) -> None:
        self._run = run
        self._reading = asyncio.Lock()
        self._status: RunStatus | None = None
        self._shown: ReportedRun | None = None
        self._history_s = 0.0
        """When the steps were read, by the clock of this process."""
        self._drawn: OrderedDict[int, str] = OrderedDict()
        """By width, the pictures of what was read."""

    async def drawn(self, width: int, draw: Draw) -> str:
        """Return the pictures of the run as it is now."""
        async with self._reading:  # who asks at the same time waits for the same answer
            shown = await self._read_on()
            if width not in self._drawn:
                self._drawn[width] = await asyncio.to_thread(draw, shown, width)
                if len(self._drawn) > MAX_WIDTHS:
                    self._drawn.popitem(last=False)
            return self._drawn[width]

    async def shown(self) -> ReportedRun:
        """Return the run as it is now; what is taken from it has to be taken at once."""
        async with self._reading:
            return await self._read_on()

    async def _read_on(self) -> ReportedRun:
        status, before = await self._run.status(), self._shown
        if before is None or not _goes_on(before, status):
            before = ReportedRun(status, RunCourse(status.job))
        course, first = before.course, before.course.num_events
        if status.event_index >= first:
            items = self._run.watch(first, follow=False)
            async for item in items:
                if isinstance(item, Event):
                    course.take((item,))
        history = before.history
        has_more = course.num_events > first or not status.phase.is_final
        if has_more and time.monotonic() - self._history_s > HISTORY_S:
            history = await self._run.history(RECORDED, max_rows=MAX_ROWS)
            self._history_s = time.monotonic()
        if self._shown is not before or course.num_events > first or history is not before.history:
            self._drawn.clear()
        self._shown = ReportedRun(status, course, history)
        return self._shown


def _goes_on(before: ReportedRun, status: RunStatus) -> bool:
    """Return whether this is the run that was read, and no other one of its name."""
    same = before.status.submitted_at_s == status.submitted_at_s
    return same and before.course.num_events <= status.event_index + 1


class RunBooks:
    """The runs that were asked for most recently."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._books: OrderedDict[str, RunBook] = OrderedDict()

    async def drawn(self, run_id: str, width: int, draw: Draw) -> str:
        """Return the pictures of a run for a width. Raises NotFoundError where there is no such
        run."""
        return await self._of(run_id, lambda book: book.drawn(width, draw))

    async def shown(self, run_id: str) -> ReportedRun:
        """Return a run as it is now. Raises NotFoundError where there is no such run."""
        return await self._of(run_id, RunBook.shown)

    async def _of(self, run_id: str, ask: Callable[[RunBook], Awaitable[T]]) -> T:
        book = self._books.get(run_id)
        if book is None:
            book = self._books.setdefault(run_id, RunBook(await self._client.get(run_id)))
            if len(self._books) > MAX_BOOKS:
                self._books.popitem(last=False)
        elif run_id in self._books:
            self._books.move_to_end(run_id)
        try:
            return await ask(book)
        except NotFoundError:
            self._books.pop(run_id, None)
            raise
