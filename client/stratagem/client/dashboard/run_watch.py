"""The one subscription to a run, for all tabs that look at it: its newest events, its progress, and
its status."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing
from itertools import islice
from typing import Final, cast

from stratagem.client.dashboard.followed import RETRY_S, Followed
from stratagem.client.dashboard.page_values import server_sent
from stratagem.client.sdk.async_run import AsyncRun
from stratagem.client.sdk.views import Event, Progress, RunStatus
from stratagem.common.base.errors import NotFoundError, told

KEPT: Final = 500
"""Events that are kept for tabs; one that is behind them reads on by itself."""
PROGRESS_S: Final = 0.25
"""Between two messages of progress: more of them nobody can read."""
STATUS_S: Final = 2.0
"""How long a status holds while nothing happens to the run."""
STATUS_PAUSE_S: Final = 0.5
"""Between two questions for the status, whoever asks."""


class RunWatch:
    """What happens to a run, as messages; it is followed while a tab looks at it."""

    def __init__(self, run: AsyncRun) -> None:
        self.run = run
        self.is_ready = False
        """The coordinator has said how many events there are."""
        self.next = 0
        """The event that comes next."""
        self.progress, self.num_progress = b"", 0
        """The latest progress, empty where none is known of the run as it is, and how many there
        were."""
        self.ended_at = -1
        """The event that would come next after the end of the run; -1: it has not ended."""
        self.gone = b""
        """Says that there is no such run."""
        self._kept: deque[tuple[Event, bytes]] = deque()
        self._followed = Followed(
            f"run {run.run_id}", self._follow, self._begin, self._forget_progress
        )
        self._latest: Progress | None = None
        self._progress_s, self._timer = -PROGRESS_S, cast("asyncio.TimerHandle | None", None)
        self._asking = asyncio.Lock()
        self._status: RunStatus | None = None
        self._status_s, self._status_of = -STATUS_PAUSE_S, -1
        self._num_changes = 0

    @property
    def is_followed(self) -> bool:
        """Return whether a tab looks at the run."""
        return self._followed.is_on

    @property
    def trouble(self) -> str:
        """Return what went wrong in following the run just now."""
        return self._followed.trouble

    @property
    def first(self) -> int:
        """Return the first event that is kept."""
        return self.next - len(self._kept)

    def event(self, index: int) -> bytes:
        """Return an event that is kept."""
        return self._kept[index - self.first][1]

    def events_from(self, index: int) -> list[Event]:
        """Return the events from one on, where they are kept; none where some are not."""
        if not (self.is_followed and self.is_ready and self.first <= index < self.next):
            return []
        return [event for event, _ in islice(self._kept, index - self.first, None)]

    def looked_at(self, tell: Callable[[], None]) -> AbstractContextManager[None]:
        """Follow the run; tell: is called when something has happened."""
        return self._followed.looked_at(tell)

    def _begin(self) -> None:
        self.gone, self.ended_at, self.is_ready = b"", -1, False
        self.changed()  # nobody has heard what happened meanwhile

    async def status(self) -> RunStatus:
        """Return how the run stands now: asked once for all who want to know it at a time."""
        async with self._asking:
            now_s = time.monotonic()
            is_current = self.is_followed and self.is_ready
            is_same = self._status_of == self._num_changes and now_s - self._status_s < STATUS_S
            if is_current and is_same and self._status is not None:
                return self._status
            await asyncio.sleep(self._status_s + STATUS_PAUSE_S - now_s if is_current else 0)
            num_changes = self._num_changes
            status = await self.run.status()
            self._status, self._status_of, self._status_s = status, num_changes, time.monotonic()
            return status

    def changed(self) -> None:
        """Ask for the status again when it is wanted: something was done to the run."""
        self._num_changes += 1

    async def _follow(self) -> bool:
        try:
            await self._follow_to_the_end()
        except NotFoundError as error:
            self.gone, self.is_ready = server_sent("gone", {"why": told(error)}), False
            self._kept.clear()
            self._forget_progress()
            self._followed.tell()
            return False
        return True

    async def _follow_to_the_end(self) -> None:
        """Follow the run to its end, and wait until something more happens to it."""
        newest = (await self.run.status()).event_index
        if not self.is_ready or newest + 1 < self.next:  # the latter is another run of the name
            self._kept.clear()
            self._forget_progress()
            self.next, self.is_ready = newest + 1, True
        self._followed.tell()
        async with aclosing(self.run.watch(self.next)) as items:
            async for item in items:
                self._take(item)
        self.ended_at = self.next
        self._forget_progress()  # how it has ended is in its status
        self._followed.tell()
        while (await self.run.status()).event_index < self.next:  # noqa: ASYNC110  (asked far away)
            await asyncio.sleep(RETRY_S)
        self.ended_at = -1

    def _take(self, item: Event | Progress) -> None:
        if isinstance(item, Event):
            self._kept.append((item, server_sent("fact", item, item.index)))
            if len(self._kept) > KEPT:
                self._kept.popleft()
            self.next = item.index + 1
            self._num_changes += 1
            self._followed.tell()
            return
        if item.reason or (self._latest and self._latest.reason):  # the status says so, too
            self._num_changes += 1
        self._latest = item
        if self._timer is None:
            pause_s = max(self._progress_s + PROGRESS_S - time.monotonic(), 0.0)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(pause_s, self._tell_progress)

    def _tell_progress(self) -> None:
        self._timer, self._progress_s = None, time.monotonic()
        self.progress, self.num_progress = (
            server_sent("progress", self._latest),
            self.num_progress + 1,
        )
        self._followed.tell()

    def _forget_progress(self) -> None:
        """Tell nobody what was measured until now: it is of a run that went on."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._latest, self.progress = None, None, b""
