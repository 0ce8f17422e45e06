"""Control a plan that runs in the torch thread from the event loop, and send its messages.

`Control` has the current view of the party, the request to abort or drain, and the exchange that
must be cut when one of these changes. The loop writes, the torch thread reads and waits. A wait
ends early at a change: with PlanStopped (aborted, drained) or ViewChanged (a newer view).
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from stratagem.common.base.errors import ConflictError
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.site.disclosure import Disclosure

# ---- Plan control ----

T = TypeVar("T")

ABORTED: Final = "aborted"
DRAINED: Final = "drained"
CLOSED: Final = "closed"
"""The reason of a plan that ended when the site's time window closed."""


class PlanStopped(Exception):
    """The plan must end here, without an error; `reason` is ABORTED, DRAINED or CLOSED."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class ViewChanged(Exception):
    """The plan's membership view is no longer the current one."""


class AwaitView(Exception):
    """The plan can continue only under a view newer than `membership`.

    Until there is one, the torch thread is free for other plans.
    """

    def __init__(self, membership: int) -> None:
        self.membership = membership
        super().__init__(membership)


class CallerGone(Exception):
    """The plan waits for data from a caller, and no call is attached.

    Until one is, the torch thread is free for other plans, which may have to run first.
    """


class Cuttable(Protocol):
    """An exchange that may block the torch thread; `cut`, from any thread, makes it raise."""

    def cut(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """One member of a party, and its logical shards."""

    worker_id: str
    address: str
    shards: range


@dataclass(frozen=True, slots=True)
class MemberView:
    """A party at one membership (set of members), as one of its members sees it."""

    term: int
    membership: int
    rank: int
    members: tuple[Peer, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def me(self) -> Peer:
        return self.members[self.rank]


class Control:
    """Controls one execution from the event loop; read by the torch thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, view: MemberView) -> None:
        self._loop = loop
        self._view = view
        self._interrupt: str | None = None
        self._is_draining = False
        self._is_deserted = self._cuts_when_deserted = False
        self._changed = asyncio.Event()
        self._cut_lock = threading.Lock()
        self._held: tuple[Cuttable, int] | None = None

    # ---- Calls of the event loop ----

    def set_view(self, view: MemberView) -> None:
        """Set a newer membership view; cut an exchange under an older one."""
        self._view = view
        self._cut()
        self._wake()

    def interrupt(self, reason: str) -> None:
        """End the plan as soon as possible: at once if it is waiting or exchanging."""
        self._interrupt = self._interrupt or reason
        self._cut()
        self._wake()

    def reset(self) -> None:
        """Forget an interrupt, as the plan is about to run again."""
        self._interrupt = None

    def drain(self) -> None:
        """Let the plan finish its present step, then end it; a waiting plan ends now."""
        self._is_draining = True
        self._wake()

    def set_deserted(self, is_deserted: bool, *, must_cut: bool = False) -> None:
        """Set whether no call has followed the plan for a while.

        must_cut: the plan exchanges with its callers, so its exchange is cut, as is any new one
        before the next call.
        """
        self._is_deserted, self._cuts_when_deserted = is_deserted, must_cut
        self._cut()
        if is_deserted:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- Calls of either side ----

    @property
    def view(self) -> MemberView:
        return self._view

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_deserted(self) -> bool:
        """True if no call has followed the plan for a while."""
        return self._is_deserted

    @property
    def is_ending(self) -> bool:
        """True if the plan was asked to end, now or after its present step."""
        return self._is_draining or self._interrupt is not None

    @property
    def is_interrupted(self) -> bool:
        """True if the plan was asked to end now."""
        return self._interrupt is not None

    def check(self) -> None:
        """Raise PlanStopped when the plan was asked to end now."""
        if self._interrupt is not None:
            raise PlanStopped(self._interrupt)

    # ---- Calls of the torch thread ----

    def hold(self, exchange: Cuttable, membership: int) -> None:
        """Register the exchange, which is cut from now on by a newer membership view, by an
        interrupt, and when a call that it needs is gone."""
        with self._cut_lock:
            self._held = (exchange, membership)
        self._cut()

    def let_go(self) -> None:
        """Unregister the exchange, which is no longer in use."""
        with self._cut_lock:
            self._held = None

    def wait(self, work: Coroutine[Any, Any, T], membership: int | None = None) -> T:
        """Run a coroutine on the loop and block for its result.

        Raises PlanStopped if the plan must end meanwhile, and ViewChanged if a membership is given
        and the view has another one.
        """
        return self._block(self._race(work, lambda: self._stand(membership)))

    def wait_for_caller(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait like `wait`, for data from callers. Raises CallerGone if no call is attached."""
        return self._block(self._race(work, self._stand_attended))

    def view_after(self, membership: int) -> MemberView:
        """Return the view of a newer membership. Raises AwaitView if there is none yet."""
        self._stand(None)
        if self._view.membership <= membership:
            raise AwaitView(membership)
        return self._view

    def _cut(self) -> None:
        with self._cut_lock:
            held = self._held
        if held is None:
            return
        exchange, membership = held
        is_left = self._is_deserted and self._cuts_when_deserted
        if is_left or self._view.membership > membership or self._interrupt is not None:
            exchange.cut()

    def _block(self, race: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(race, self._loop).result()

    async def _race(self, work: Coroutine[Any, Any, T], stand: Callable[[], None]) -> T:
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                stand()
                await _first(task, self._changed)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _stand_attended(self) -> None:
        self._stand(None)
        if self._is_deserted:
            raise CallerGone

    def _stand(self, membership: int | None) -> None:
        self.check()
        if self._is_draining:
            raise PlanStopped(DRAINED)
        if membership is not None and self._view.membership != membership:
            raise ViewChanged


async def _first(task: asyncio.Future[Any], changed: asyncio.Event) -> None:
    """Wait until either the task or `changed` is done."""
    waiter = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)


# ---- Messages to attached calls ----
#
# An outbox has the needed blobs, the latest progress and stall, the parts of the step history, the
# unsent log lines and the outcome, and turns them into the messages of an Execute stream, also for
# calls that attach later. It is used on the event loop.

MAX_LOG_LINES: Final = 1000


@dataclass(slots=True)
class _Parts:
    """The position of one attached call in the sequence of step-history parts."""

    taken_from: list[pb.HistoryPart]
    num_taken: int = 0

    def has_next_of(self, history: list[pb.HistoryPart]) -> bool:
        """Return whether there is a part that the call has not received yet."""
        return len(history) > (self.num_taken if self.taken_from is history else 0)

    def next_of(self, history: list[pb.HistoryPart]) -> pb.HistoryPart | None:
        """Return the next part for the call; after a restart the first one."""
        if not self.has_next_of(history):
            return None
        if self.taken_from is not history:
            self.taken_from, self.num_taken = history, 0
        self.num_taken += 1
        return history[self.num_taken - 1]


class Outbox:
    """The messages of one execution, for any number of attached calls."""

    def __init__(self, worker_id: str, disclosure: Disclosure | None = None) -> None:
        """Begin without messages. disclosure: a site's rules; None to send everything."""
        self._worker_id, self._disclosure = worker_id, disclosure
        self._changed = asyncio.Event()
        self._needed: dict[int, pb.NeedBlob] = {}  # by serial number
        self._num_needs = 0
        self._progress: pb.Progress | None = None
        self._num_progress = 0
        self._stall = pb.Stall()
        self._lines: deque[pb.LogLine] = deque()
        self._num_dropped = 0
        self._profiles: deque[pb.Profile] = deque()
        self._history: list[pb.HistoryPart] = []
        self._result: pb.ExecuteResult | None = None
        self._failure: BaseException | None = None
        self._num_following = 0
        self.activity = "waiting"
        self.step = 0

    def set_activity(self, activity: str) -> None:
        """Set the present activity of the plan, as shown in SessionInfo."""
        self.activity = activity

    def need(self, digest: str, *, was_here: bool = False) -> None:
        """Announce that the plan waits for a blob. was_here: it was dropped here to make room."""
        self.has(digest)
        self._num_needs += 1
        self._needed[self._num_needs] = pb.NeedBlob(digest=digest, was_here=was_here)
        self._wake()

    def has(self, digest: str) -> None:
        """Note that the plan no longer waits for this blob."""
        self._needed = {n: need for n, need in self._needed.items() if need.digest != digest}

    def progress(self, progress: pb.Progress) -> None:
        """Set the progress to send next; unsent earlier progress is dropped."""
        self._progress = self._disclosure.progress(progress) if self._disclosure else progress
        self.step = progress.step
        self._num_progress += 1
        self._wake()

    def stall(self, stall: pb.Stall) -> None:
        """Set the report of a stalled thread; a report without seconds ends the stall."""
        disclosure = self._disclosure
        self._stall = disclosure.stall(stall, self.activity) if disclosure else stall
        self._wake()

    def log(self, line: pb.LogLine) -> None:
        """Add a log line. If too many are unsent, the oldest one is dropped and counted."""
        if self._disclosure is not None and not self._disclosure.shares_logs:
            return
        if len(self._lines) >= MAX_LOG_LINES:
            self._lines.popleft()
            self._num_dropped += 1
        self._lines.append(line)
        self._wake()

    def add_profile(self, profile: pb.Profile) -> None:
        """Add a recorded profile, which is sent to one call only, like a log line."""
        if self._disclosure is None:
            self._profiles.append(profile)
            self._wake()

    def restart_history(self) -> None:
        """Drop all parts of the step history; the next part begins with the first row again."""
        self._history = []

    def add_history(self, part: pb.HistoryPart) -> None:
        """Add the next part of the step history, which every call receives in order."""
        if self._disclosure is None:
            self._history.append(part)
            self._wake()

    def finish(self, result: pb.ExecuteResult) -> None:
        self._result = result
        self.activity = "idle"
        self._wake()

    def fail(self, failure: BaseException) -> None:
        """End every attached call with this error."""
        self._failure = self._disclosure.failure(failure) if self._disclosure else failure
        self._wake()

    def close(self) -> None:
        self.fail(ConflictError("the session was closed"))

    def reopen(self) -> None:
        """Forget the outcome, as the plan runs again."""
        self._result = None
        self.activity = "waiting"

    @property
    def result(self) -> pb.ExecuteResult | None:
        return self._result

    async def ended(self) -> None:
        """Wait for the outcome."""
        while self._result is None and self._failure is None:
            await self._changed.wait()

    async def until_reported(self) -> None:
        """Wait for the outcome, and until every attached call has received it."""
        await self.ended()
        while self._num_following:
            await self._changed.wait()

    async def follow(self) -> AsyncGenerator[pb.ExecuteResponse, None]:
        """Yield all messages until the outcome. Raises the error of the execution.

        Log lines and profiles are sent once, to the first call that takes them; all other messages
        are sent to every call, parts of the step history one by one and in order.
        """
        self._num_following += 1
        try:
            async with aclosing(self._messages()) as messages:
                async for message in messages:
                    yield message
        finally:
            self._num_following -= 1
            self._wake()

    async def _messages(self) -> AsyncGenerator[pb.ExecuteResponse, None]:
        seen_progress, seen_needs, seen_stall = 0, 0, pb.Stall()
        parts = _Parts(self._history)
        while True:
            changed = self._changed
            # Needs are looked up by number, as others are added while one is being sent.
            for serial in [number for number in self._needed if number > seen_needs]:
                seen_needs = serial
                if (need := self._needed.get(serial)) is not None:
                    yield pb.ExecuteResponse(need_blob=need)
            while (line := self._next_line()) is not None:
                yield pb.ExecuteResponse(log=line)
            while self._profiles:
                yield pb.ExecuteResponse(profile=self._profiles.popleft())
            while (part := parts.next_of(self._history)) is not None:
                yield pb.ExecuteResponse(history=part)
            # The last progress may have come with the outcome, while the previous one was sent.
            while self._progress is not None and self._num_progress > seen_progress:
                seen_progress = self._num_progress
                yield pb.ExecuteResponse(progress=self._progress)
            if self._stall != seen_stall:
                seen_stall = self._stall
                yield pb.ExecuteResponse(stall=seen_stall)
            # Messages that came meanwhile are sent before the outcome.
            if self._lines or self._profiles or parts.has_next_of(self._history):
                continue
            if self._failure is not None:
                raise self._failure
            if self._result is not None:
                yield pb.ExecuteResponse(result=self._result)
                return
            await changed.wait()

    def _next_line(self) -> pb.LogLine | None:
        if self._num_dropped:
            text = f"({self._num_dropped} lines were dropped here)"
            self._num_dropped = 0
            time_s = self._lines[0].time_s if self._lines else 0.0
            return pb.LogLine(worker_id=self._worker_id, time_s=time_s, level="WARNING", text=text)
        return self._lines.popleft() if self._lines else None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
