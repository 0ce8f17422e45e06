"""Control of a plan that runs in the torch thread by the event loop, and the plan's waits.

Owns the current view of the party, the wish to abort or drain, and the exchange that must be cut
when one of them changes. The loop side writes, the torch side reads and waits; a wait ends early
when one of them changes: with PlanStopped (aborted, drained) or ViewChanged (a newer view).
Knows nothing of engines, sessions or messages beyond the view.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")

ABORTED: Final = "aborted"
DRAINED: Final = "drained"
CLOSED: Final = "closed"
"""The window of the site has ended."""


class PlanStopped(Exception):
    """The plan ends here, without an error; `reason` is ABORTED, DRAINED or CLOSED."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class ViewChanged(Exception):
    """The view that the plan works with is no longer the current one."""


class AwaitView(Exception):
    """The plan can continue only under a view newer than `membership`.

    Until there is one, the torch thread is free for other plans.
    """

    def __init__(self, membership: int) -> None:
        self.membership = membership
        super().__init__(membership)


class CallerGone(Exception):
    """The plan waits for what only a caller can bring, and no call is attached any more.

    Until one is, the torch thread is free for other plans: theirs may have to come first.
    """


class Cuttable(Protocol):
    """An exchange that may block the torch thread; cut(), from any thread, makes it raise."""

    def cut(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """One member of a party, and the logical shards it computes."""

    worker_id: str
    address: str
    shards: range


@dataclass(frozen=True, slots=True)
class MemberView:
    """A party at one membership, as one of its members sees it."""

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
    """Controls one execution, from the event loop and from the torch thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, view: MemberView) -> None:
        self._loop = loop
        self._view = view
        self._interrupt: str | None = None
        self._is_draining = False
        self._is_deserted = self._cuts_when_deserted = False
        self._changed = asyncio.Event()
        self._cut_lock = threading.Lock()
        self._held: tuple[Cuttable, int] | None = None

    # ---- loop side ----

    def set_view(self, view: MemberView) -> None:
        """Give the plan a newer view; what it exchanges under an older one is cut."""
        self._view = view
        self._cut()
        self._wake()

    def interrupt(self, reason: str) -> None:
        """End the plan at the next chance, now if it is waiting or exchanging."""
        self._interrupt = self._interrupt or reason
        self._cut()
        self._wake()

    def reset(self) -> None:
        """Forget an interrupt, as the plan is about to run again."""
        self._interrupt = None

    def drain(self) -> None:
        """Let the plan finish the step it is in, then end it; a plan that waits ends now."""
        self._is_draining = True
        self._wake()

    def set_deserted(self, is_deserted: bool, *, must_cut: bool = False) -> None:
        """Set whether no call has followed the plan for a while.

        must_cut: the plan exchanges with its callers, so that exchange is cut, as is one that it
        makes before there is a call again.
        """
        self._is_deserted, self._cuts_when_deserted = is_deserted, must_cut
        self._cut()
        if is_deserted:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- either side ----

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
        """True if the plan was asked to end: now, or after its present step."""
        return self._is_draining or self._interrupt is not None

    @property
    def is_interrupted(self) -> bool:
        """True if the plan was asked to end now."""
        return self._interrupt is not None

    def check(self) -> None:
        """Raise PlanStopped when the plan was asked to end now."""
        if self._interrupt is not None:
            raise PlanStopped(self._interrupt)

    # ---- torch side ----

    def hold(self, exchange: Cuttable, membership: int) -> None:
        """Register the exchange that is cut from now on by a newer view, by an interrupt, and when
        no call is left that it needs."""
        with self._cut_lock:
            self._held = (exchange, membership)
        self._cut()

    def let_go(self) -> None:
        """Release the exchange, which is no longer in use."""
        with self._cut_lock:
            self._held = None

    def wait(self, work: Coroutine[Any, Any, T], membership: int | None = None) -> T:
        """Run a coroutine on the loop and block for its result.

        Raises PlanStopped when the plan is to end meanwhile, and, where a membership is given,
        ViewChanged when the view is of another one.
        """
        return self._block(self._race(work, lambda: self._stand(membership)))

    def wait_for_caller(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait as `wait` does, for what callers bring; raise CallerGone when there are none."""
        return self._block(self._race(work, self._stand_attended))

    def view_after(self, membership: int) -> MemberView:
        """Return the view of a higher membership; raise AwaitView while there is none."""
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
    """Wait for whichever comes first."""
    waiter = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
