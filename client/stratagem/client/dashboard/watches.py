"""Watch the coordinator, one run, or all runs, with one subscription for all tabs of the page."""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final, cast

from stratagem.client.course.views import Event, Progress, RunsChange, RunStatus
from stratagem.client.dashboard.values import as_json, server_sent
from stratagem.client.sdk.client import AsyncClient
from stratagem.client.sdk.run import AsyncRun
from stratagem.common.base.errors import (
    NotFoundError,
    PermissionDeniedError,
    StandbyError,
    StratagemError,
    UnauthenticatedError,
    WrongStateError,
    told,
)

# ---- Coordinator ----
#
# The coordinator is asked for its health at intervals, for the banner of the page.

ASK_PAUSE_S: Final = 2.0
"""The time between two checks of whether the coordinator answers."""
ANSWER_S: Final = 5.0
"""The time without an answer after which the coordinator counts as away."""


@dataclass(frozen=True, slots=True)
class CoordinatorHealth:
    """The coordinator's state as the page's banner shows it."""

    state: str = "connecting"
    """One of live, away, standby, denied, version, connecting, or broken (the page has failed)."""
    why: str = ""


class CoordinatorWatch:
    """A task that keeps checking whether the coordinator answers, and tells tabs of changes."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.state = CoordinatorHealth()
        self.answered_s: float | None = None
        """The time of the last answer, by this process's monotonic clock."""
        self._asked_s = -ASK_PAUSE_S
        self._began_s: float | None = None
        """The time of the first check."""
        self.subscription = Subscription("the coordinator", self._follow)

    async def _follow(self) -> bool:
        await asyncio.sleep(self._asked_s + ASK_PAUSE_S - time.monotonic())
        self._asked_s = time.monotonic()
        self._began_s = self._asked_s if self._began_s is None else self._began_s
        self._take(await self._ask())
        return True

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last answer, or since the first check if there was none."""
        since_s = self._began_s if self.answered_s is None else self.answered_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def _ask(self) -> CoordinatorHealth:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.client.workers()
        except TimeoutError:
            return CoordinatorHealth("away", f"{self.client.address} does not answer")
        except StratagemError as error:
            state, has_been = state_of(error), self.answered_s is not None
            is_away = state == "away" and has_been  # the text of a connection error helps nobody
            why = f"{self.client.address} does not answer" if is_away else told(error)
            return CoordinatorHealth(state, why)
        self.answered_s = time.monotonic()
        return CoordinatorHealth("live")

    def _take(self, state: CoordinatorHealth) -> None:
        if state != self.state:
            self.state = state
            self.subscription.notify()


def state_of(error: StratagemError) -> str:
    """Return the state that the banner shows after a call that failed with this error."""
    match error:
        case StandbyError():
            return "standby"
        case UnauthenticatedError() | PermissionDeniedError():
            return "denied"
        case WrongStateError():
            return "version"
        case _:
            return "away"


# ---- One run ----
#
# All tabs that look at a run share one subscription to its newest events, its progress, and its
# status.

KEPT: Final = 500
"""The number of events cached for tabs; for a tab further behind, older events are read again."""
PROGRESS_S: Final = 0.25
"""The shortest time between two progress messages."""
STATUS_S: Final = 2.0
"""The time for which a status is reused while nothing happens to the run."""
STATUS_PAUSE_S: Final = 0.5
"""The shortest time between two status requests, whoever asks."""


class RunWatch:
    """The events and progress of one run as messages for tabs; followed while a tab shows it."""

    def __init__(self, run: AsyncRun) -> None:
        self.run = run
        self.is_ready = False
        """The number of the run's events is known, so streams to tabs may begin."""
        self.next = 0
        """The index of the next expected event."""
        self.progress, self.num_progress = b"", 0
        """The latest progress message, empty if none applies now; the number of messages so far."""
        self.ended_at = -1
        """The index after the run's last event; -1 while the run has not ended."""
        self.gone = b""
        """The message that tells tabs that the run does not exist; empty if it does."""
        self._recent: deque[tuple[Event, bytes]] = deque()
        self.subscription = Subscription(
            f"run {run.run_id}", self._follow, self._begin, self._forget_progress
        )
        self._latest: Progress | None = None
        self._progress_s, self._timer = -PROGRESS_S, cast("asyncio.TimerHandle | None", None)
        self._asking = asyncio.Lock()
        self._status: RunStatus | None = None
        self._status_s, self._status_of = -STATUS_PAUSE_S, -1
        self._num_changes = 0

    @property
    def first(self) -> int:
        """Return the index of the oldest cached event."""
        return self.next - len(self._recent)

    def event(self, index: int) -> bytes:
        """Return a cached event as a message."""
        return self._recent[index - self.first][1]

    def events_from(self, index: int) -> list[Event]:
        """Return the events from an index on, if all of them are cached; else none."""
        if not (self.subscription.is_on and self.is_ready and self.first <= index < self.next):
            return []
        return [event for event, _ in islice(self._recent, index - self.first, None)]

    def _begin(self) -> None:
        self.gone, self.ended_at, self.is_ready = b"", -1, False
        self.changed()  # changes in the meantime were missed

    async def status(self) -> RunStatus:
        """Return the current status of the run; concurrent callers share one request."""
        async with self._asking:
            now_s = time.monotonic()
            is_current = self.subscription.is_on and self.is_ready
            is_same = self._status_of == self._num_changes and now_s - self._status_s < STATUS_S
            if is_current and is_same and self._status is not None:
                return self._status
            await asyncio.sleep(self._status_s + STATUS_PAUSE_S - now_s if is_current else 0)
            num_changes = self._num_changes
            status = await self.run.status()
            self._status, self._status_of, self._status_s = status, num_changes, time.monotonic()
            return status

    def changed(self) -> None:
        """Invalidate the cached status, because a caller has changed the run."""
        self._num_changes += 1

    async def _follow(self) -> bool:
        try:
            await self._follow_to_the_end()
        except NotFoundError as error:
            self.gone, self.is_ready = server_sent("gone", {"why": told(error)}), False
            self._recent.clear()
            self._forget_progress()
            self.subscription.notify()
            return False
        return True

    async def _follow_to_the_end(self) -> None:
        """Follow the run to its end, then wait until somebody resumes it."""
        newest = (await self.run.status()).event_index
        if not self.is_ready or newest + 1 < self.next:  # smaller: another run has this name
            self._recent.clear()
            self._forget_progress()
            self.next, self.is_ready = newest + 1, True
        self.subscription.notify()
        async with aclosing(self.run.watch(self.next)) as items:
            async for item in items:
                self._take(item)
        self.ended_at = self.next
        self._forget_progress()  # its status says how it ended
        self.subscription.notify()
        while (await self.run.status()).event_index < self.next:  # noqa: ASYNC110  (asked far away)
            await asyncio.sleep(RETRY_S)
        self.ended_at = -1

    def _take(self, item: Event | Progress) -> None:
        if isinstance(item, Event):
            self._recent.append((item, server_sent("fact", item, item.index)))
            if len(self._recent) > KEPT:
                self._recent.popleft()
            self.next = item.index + 1
            self._num_changes += 1
            self.subscription.notify()
            return
        if item.reason or (self._latest and self._latest.reason):  # the status has the reason too
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
        self.subscription.notify()

    def _forget_progress(self) -> None:
        """Drop the latest progress: the run has ended, continues from a commit, or is gone."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._latest, self.progress = None, None, b""


# ---- All runs ----
#
# All tabs that show the list share one subscription to all runs.

MAX_RUNS: Final = 200
"""The largest number of runs in one message."""
MAX_DELETED: Final = 1000
"""The largest number of deleted runs to remember; beyond it, tabs get all runs again."""


@dataclass(slots=True)
class SentRuns:
    """The position of one tab in the changes of the list of runs: what it has been sent."""

    generation: int = -1
    num_changes: int = 0
    is_complete: bool = False


class RunsWatch:
    """The list of all runs and its changes as messages for tabs; followed while a tab shows it."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._runs: OrderedDict[str, tuple[int, str]] = OrderedDict()
        """The number of each run's newest change, and its brief as JSON ("" for a deleted run),
        keyed by run id and ordered by that number."""
        self._generation = self._num_changes = 0
        self._is_complete, self._time_s = False, 0.0
        self.subscription = Subscription("all runs", self._follow, end=self._begin)

    def news(self, seen: SentRuns) -> list[bytes]:
        """Return the changes that a tab lacks, as messages, and advance its position."""
        is_first = seen.generation != self._generation
        since = 0 if is_first else seen.num_changes
        changed: list[tuple[str, str]] = []
        for run_id, (number, brief) in reversed(self._runs.items()):
            if number <= since:
                break
            changed.append((run_id, brief))
        is_complete = self._is_complete and not (seen.is_complete and not is_first)
        if not changed and not is_complete:
            return []
        seen.generation, seen.num_changes = self._generation, self._num_changes
        seen.is_complete = self._is_complete
        changed.reverse()
        return [
            self._message(
                changed[start : start + MAX_RUNS],
                is_first=is_first and not start,
                is_last=start + MAX_RUNS >= len(changed),
            )
            for start in range(0, max(len(changed), 1), MAX_RUNS)
        ]

    def _message(self, changed: list[tuple[str, str]], *, is_first: bool, is_last: bool) -> bytes:
        deleted = [run_id for run_id, brief in changed if not brief]
        rest = as_json({
            "deleted": deleted, "is_first": is_first, "time_s": self._time_s,
            "is_complete": self._is_complete and is_last,
        })  # fmt: skip
        briefs = ",".join(brief for _, brief in changed if brief)
        return f'event: runs\ndata: {{"runs":[{briefs}],{rest[1:]}\n\n'.encode()

    async def _follow(self) -> bool:
        async for change in self._client.watch_runs():
            self._take(change)
        return True

    def _take(self, change: RunsChange) -> None:
        if change.is_first:
            self._begin()
        self._num_changes += 1
        briefs = {brief.run_id: as_json(brief) for brief in change.runs}
        for run_id, brief in {**briefs, **dict.fromkeys(change.deleted, "")}.items():
            self._runs[run_id] = (self._num_changes, brief)
            self._runs.move_to_end(run_id)
        self._is_complete, self._time_s = change.is_complete, change.time_s
        if len(change.deleted) and sum(not brief for _, brief in self._runs.values()) > MAX_DELETED:
            self._runs = OrderedDict((id_, entry) for id_, entry in self._runs.items() if entry[1])
            self._generation += 1  # all tabs get the remaining runs again
        self.subscription.notify()

    def _begin(self) -> None:
        """Forget all runs, because the coordinator is about to list them again."""
        self._runs.clear()
        self._generation += 1
        self._num_changes, self._is_complete = 0, False


# ---- Shared subscriptions ----
#
# A subscription runs in one task, while a tab looks at it.

RETRY_S: Final = 2.0
"""The pause before a failed request is repeated, or an ended run is checked again."""
TROUBLE_S: Final = 15.0
"""The time for which tabs are told of a failure, longer than one heartbeat interval."""

log = logging.getLogger("stratagem.client")


def nothing() -> None:
    """Do nothing."""


class Subscription:
    """A stream that one task follows while there are users, and again after any failure."""

    def __init__(
        self,
        what: str,
        follow: Callable[[], Awaitable[bool]],
        begin: Callable[[], None] = nothing,
        end: Callable[[], None] = nothing,
    ) -> None:
        """Begin without users. what: a name for the log. follow: follows the stream; returns True
        to be called again, False if there is nothing more to follow. begin, end: called before the
        first user comes, and after the last has left."""
        self._what, self._follow, self._begin, self._end = what, follow, begin, end
        self._readers: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._why, self._failed_s = "", -TROUBLE_S

    @property
    def is_on(self) -> bool:
        """Return whether there are users."""
        return self._task is not None

    @property
    def trouble(self) -> str:
        """Return the latest unexpected failure as long as tabs are to be told of it; else ""."""
        return self._why if time.monotonic() - self._failed_s < TROUBLE_S else ""

    @contextmanager
    def subscribe(self, on_change: Callable[[], None]) -> Iterator[None]:
        """Context manager that makes the caller a user; on_change is called after each change."""
        self._readers.append(on_change)
        if self._task is None:
            self._begin()
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._readers.remove(on_change)
            if not self._readers:
                self._task.cancel()
                self._task = None
                self._end()

    def notify(self) -> None:
        """Call on_change of all users."""
        for on_change in self._readers:
            on_change()

    async def _run(self) -> None:
        while True:
            try:
                if not await self._follow():
                    return
            except StratagemError:
                await asyncio.sleep(RETRY_S)  # the beat reports it
            except Exception as error:
                log.exception("the page follows %s no further; it begins again", self._what)
                self._why = f"an error in following {self._what}: {error!r}; it begins again"
                self._failed_s = time.monotonic()
                self.notify()
                await asyncio.sleep(RETRY_S)
