"""Keep one task per pending effect: start it, retry it with backoff, and cancel it.

A task runs until its effect leaves the set or is given up. core/effect_failures.py decides which
failures are retried. A cancelled task may clean up, and closing waits for that, too. Effects that
need compute slots start when all of them are free.

The supervisor is level-triggered: the set alone decides what must run. It is one of the two places
that catch every exception, because a failing effect must be reported and retried.
"""

import asyncio
import sys
import time
from collections import Counter, defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Hashable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
import structlog

from stratagem.common.base.errors import (
    StratagemError,
    UnavailableError,
    leaves,
    sole,
    told,
    without_frames,
)
from stratagem.common.base.ids import RunId
from stratagem.common.base.retry import Backoff
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.coordinator.core.effect_failures import TROUBLE, FailedTries
from stratagem.coordinator.core.effects import Effect, EvaluateState, Request, grant, slots
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.observe.logs import ids_of

# ---- Supervisor ----

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 5.0
GRACE_S = 5.0
"""The time that `close` waits for stopped tasks to end."""
_OF_PROXIES: Final = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED)
"""Status codes that none of our errors maps to; gRPC makes them of a proxy's HTTP 500, 404."""

log = structlog.get_logger()


class RunSupervisor:
    def __init__(
        self,
        perform: Callable[[Effect], Awaitable[None]],
        give_up: Callable[[Effect, FailedTries], Awaitable[None]],
        on_trouble: Callable[[Effect, FailedTries], None] = lambda effect, tries: None,
    ) -> None:
        """Begin without tasks. give_up: removes an effect that must not be retried. on_trouble:
        called with every effect that keeps failing."""
        self._perform, self._give_up = perform, give_up
        self._on_trouble = on_trouble
        self._tasks: dict[Effect, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that were stopped but have not ended yet."""
        self._of_run: defaultdict[RunId, set[Effect]] = defaultdict(set)
        """The effects that have a task, keyed by run."""
        self._failed: dict[Effect, FailedTries] = {}
        """The failed attempts per effect, until an attempt succeeds."""
        self._waiting: list[Request[Effect, Member]] = []
        self._yielded: set[Effect] = set()
        self.num_failures: Counter[str] = Counter()
        """The number of failed attempts, per kind of effect."""

    @property
    def num_waiting(self) -> int:
        """Return the number of effects that wait for compute slots."""
        return len(self._waiting)

    def by_kind(self) -> tuple[Counter[str], Counter[str]]:
        """Return the numbers of running effects, and of effects waiting for slots, per kind."""
        running = Counter(type(effect).__name__ for effect in self._tasks)
        return running, Counter(type(request.key).__name__ for request in self._waiting)

    def reconcile(self, effects: frozenset[Effect], of: Collection[RunId] | None = None) -> None:
        """Start and stop tasks so that exactly these effects run. effects: all pending effects of
        the runs `of`, or of all runs if `of` is None."""
        concerned = self._of_run if of is None else set(of)
        running = [started for run_id in concerned for started in self._of_run.get(run_id, ())]
        ended = [effect for effect in running if effect not in effects]
        queued = {request.key for request in self._waiting}
        self._waiting = [
            request
            for request in self._waiting
            if request.key in effects or (of is not None and request.key.run_id not in concerned)
        ]
        unqueued = queued - {request.key for request in self._waiting}
        tries = {old: self._failed.pop(old) for old in (*ended, *unqueued) if old in self._failed}
        for effect in ended:
            self._stop(effect)
        new = [e for e in effects if e not in self._tasks and e not in queued]
        for effect in sorted(new, key=lambda e: (e.run_id, repr(e))):
            # Other members do not mend a failure that has another reason.
            failed = next((tries[old] for old in tries if _is_same_request(effect, old)), None)
            if failed is not None and not failed.are_too_many:
                self._failed[effect] = failed
            self._enqueue(effect, succeeds=any(_is_same_work(effect, old) for old in ended))
        self._start_granted()

    def yield_slots(self, effect: Effect) -> None:
        """Release the compute slots of an effect that continues without them."""
        if effect in self._tasks:
            self._yielded.add(effect)
            self._start_granted()

    async def close(self) -> None:
        """Stop all effects, and wait until they and those stopped earlier have ended."""
        self._waiting.clear()
        for effect in list(self._tasks):
            self._stop(effect)
        if self._ending:
            _, unfinished = await asyncio.wait(self._ending, timeout=GRACE_S)
            for task in unfinished:
                log.error("effect does not end", effect=task.get_name(), waited_s=GRACE_S)

    def _enqueue(self, effect: Effect, *, succeeds: bool) -> None:
        needed = slots(effect)
        request = Request(effect, needed)
        if not needed:
            self._start(effect)
        elif succeeds:
            # The same segment with other members keeps its turn.
            self._waiting.insert(0, request)
        else:
            self._waiting.append(request)

    def _start_granted(self) -> None:
        if not self._waiting:
            return
        busy = self._tasks.keys() - self._yielded
        busy_slots = [slot for effect in busy for slot in slots(effect)]
        granted = grant(self._waiting, busy_slots)
        self._waiting = [request for request in self._waiting if request not in granted]
        for request in granted:
            self._start(request.key)

    def _start(self, effect: Effect) -> None:
        name = f"{type(effect).__name__} {effect.run_id}"
        self._tasks[effect] = asyncio.create_task(self._persist(effect), name=name)
        self._of_run[effect.run_id].add(effect)

    def _stop(self, effect: Effect) -> None:
        task = self._tasks.pop(effect)
        self._failed.pop(effect, None)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()
        self._yielded.discard(effect)
        self._of_run[effect.run_id].discard(effect)
        if not self._of_run[effect.run_id]:
            del self._of_run[effect.run_id]

    async def _persist(self, effect: Effect) -> None:
        """Perform an effect, with retries, until the task is cancelled."""
        try:
            await self._keep_trying(effect)
        except asyncio.CancelledError as end:
            # The task keeps the error, and the frames of the error keep the task.
            raise without_frames(end) from None

    async def _keep_trying(self, effect: Effect) -> NoReturn:
        backoff, tries = (
            Backoff(FIRST_RETRY_S, LAST_RETRY_S),
            self._failed.get(effect, FailedTries()),
        )
        while True:
            pause_s, were_too_many = backoff.next_s(), tries.are_too_many
            tries = await self._attempt(effect, tries, pause_s)
            stop_if_cancelled()
            self._failed[effect] = tries
            if tries.are_too_many and not were_too_many:
                continue  # it is given up at once
            if tries.num >= TROUBLE:
                self._on_trouble(effect, tries)
            # The result has usually taken the effect out of the set, and cancelled this task.
            await asyncio.sleep(pause_s)

    async def _attempt(self, effect: Effect, tries: FailedTries, pause_s: float) -> FailedTries:
        """Perform the effect once, or give it up after too many failures; return its failures."""
        bound = log.bind(**ids_of(effect.run_id, effect), effect=type(effect).__name__)
        began_s = time.monotonic()
        try:
            await (self._give_up(effect, tries) if tries.are_too_many else self._perform(effect))
        except asyncio.CancelledError:  # gRPC raises it, too, where a channel closes under a call
            stop_if_cancelled()
            reason = "a call that it waited for was cancelled"
            bound.info("effect was cut off, trying again", pause_s=pause_s)
            failed = self._counted(effect, tries, [UnavailableError(reason)], reason, began_s)
        except Exception as error:  # the task supervisor
            stop_if_cancelled()  # a failure on the way out is not tried again
            reason, errors = told(error), [_ours(leaf) for leaf in leaves(error)]
            failed = self._counted(effect, tries, errors, reason, began_s)
            if failed.is_defect:
                bound.error("effect raised", reason=reason, pause_s=pause_s, exc_info=sole(error))
            else:
                bound.warning("effect failed", reason=reason, pause_s=pause_s)
            del errors  # one has this frame
        else:
            return FailedTries()
        # A failure to give up does not count as a failure of the effect.
        return tries if tries.are_too_many else replace(failed, next_s=time.time() + pause_s)

    def _counted(
        self,
        effect: Effect,
        tries: FailedTries,
        errors: Sequence[BaseException],
        reason: str,
        began_s: float,
    ) -> FailedTries:
        self.num_failures[type(effect).__name__] += 1
        lasted_s = time.monotonic() - began_s
        return tries.and_another(effect, errors, reason, time.time(), lasted_s)


def _ours(error: BaseException) -> BaseException:
    """Convert a gRPC error to a StratagemError.

    A broken proxy on the way answers with codes that say nothing about the worker, and a channel
    that was closed is opened again; both become UnavailableError.
    """
    translated, call = error, error.__cause__
    if isinstance(error, grpc.RpcError):
        translated, call = from_rpc_error(error), error
    is_of_a_proxy = isinstance(call, grpc.RpcError) and call.code() in _OF_PROXIES
    if (type(translated) is StratagemError and is_of_a_proxy) or (
        isinstance(error, grpc.aio.UsageError) and "closed" in str(error).lower()
    ):
        return UnavailableError(str(translated))
    return translated


def _is_same_request(new: Effect, old: Effect) -> bool:
    """Return True if the new effect asks for the same unfinished work as the old one, perhaps of
    other workers.

    A success ends with a fact that removes its effect, and the next effect differs in one of the
    compared fields; so failures before a success no longer count.
    """

    def asked(effect: Effect) -> tuple[object, ...]:
        return tuple(getattr(effect, name, None) for name in ("client", "attempt", "step"))

    # Evaluations after different rounds look the same.
    is_told_apart = not isinstance(new, EvaluateState)
    return is_told_apart and _is_same_work(new, old) and asked(new) == asked(old)


def _is_same_work(new: Effect, old: Effect) -> bool:
    """Return True if the new effect continues the old one's work and keeps its turn."""

    def work(effect: Effect) -> tuple[object, ...]:
        segment = getattr(effect, "segment", getattr(effect, "round_num", None))
        return (
            type(effect),
            effect.run_id,
            effect.party if hasattr(effect, "party") else "",
            segment,
        )

    return work(new) == work(old)


# ---- Chores ----
#
# Nothing waits for a chore. It outlives its caller, but not the process.


class Chores:
    """Background tasks that nobody waits for. An error is logged, and the next chore of the same
    kind makes up for the failure."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def do(self, coroutine: Coroutine[Any, Any, None], what: str) -> None:
        """Start a background task; `what` names the task in the log."""
        task = asyncio.create_task(coroutine, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def close(self) -> None:
        """Cancel all chores and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        error = error and sole(error)
        if isinstance(error, UnavailableError):  # a worker that is gone needs nothing more
            log.info("chore not done", what=task.get_name(), reason=told(error))
        elif isinstance(error, OSError | StratagemError):
            log.warning("chore failed", what=task.get_name(), reason=told(error))
        elif error is not None:
            log.error("chore failed", what=task.get_name(), exc_info=error)


# ---- Task groups ----
#
# These task groups distinguish a cancellation from a failure of one of their tasks.
#
# A TaskGroup of Python before 3.13 that is cancelled while one of its tasks fails raises the
# failure alone. Code that catches failures and continues must check here whether it should. Such
# a group also counts its own task as cancelled permanently when a member fails after the body has
# ended, so code that may ask later uses `task_group`.


def stop_if_cancelled() -> None:
    """Raise CancelledError if the current task has been asked to cancel."""
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Context manager for an asyncio.TaskGroup whose failures leave no cancellation behind."""
    group = asyncio.TaskGroup()
    was_requested = False
    try:
        async with group:
            try:
                yield group
            finally:
                was_requested = _has_cancelled_its_task(group)
    finally:
        task = asyncio.current_task()
        if task is not None and not was_requested and _has_cancelled_its_task(group):
            task.uncancel()


def _has_cancelled_its_task(group: asyncio.TaskGroup) -> bool:
    if sys.version_info >= (3, 13):
        return False  # the group takes that back itself
    return bool(group._parent_cancel_requested)  # type: ignore[attr-defined]


# ---- Throttle ----
#
# A throttled chore runs once for all requests that arrive meanwhile, with a pause between two
# runs.


class Paced:
    """Rate limit for a chore: runs at most once per pause, however often requested. Runs on the
    event loop."""

    def __init__(self, chore: Callable[[], Awaitable[None]], pause_s: float) -> None:
        """Make a limit. pause_s: the time from the end of one run to the start of the next."""
        self._chore = chore
        self._pause_s = pause_s
        self._is_asked = False
        self._next_s = time.monotonic()
        self._lock = asyncio.Lock()

    async def ask(self) -> None:
        """Request a run of the chore that starts after this call; return at once."""
        if self._is_asked:
            return
        self._is_asked = True
        async with self._lock:
            await asyncio.sleep(max(0.0, self._next_s - time.monotonic()))
            self._is_asked = False
            try:
                await self._chore()
            finally:
                self._next_s = time.monotonic() + self._pause_s


# ---- Shared transactions ----
#
# Facts about results that become durable at about the same time share a transaction.
#
# Updates that arrive at once are on the disk within milliseconds of each other. Reported one by
# one, each would need a transaction of its own, with all that follows from it. A member that is
# done therefore waits for those that were under way at that moment: no longer than its own work
# took, and at most LONGEST_WAIT_S. This runs on the event loop and knows nothing of updates and
# facts.

LONGEST_WAIT_S: Final = 0.05
"""The longest wait for other members of a group; it may make an update late, so it is short."""


@dataclass(slots=True)
class _Group:
    """The members that report together; the group is closed once the first member is done."""

    num_missing: int = 0
    all_done: asyncio.Event = field(default_factory=asyncio.Event)


class Together:
    """Groups of tasks that report together, keyed by what they have in common."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Group] = {}

    @contextmanager
    def member(self, key: Hashable) -> Iterator["Membership"]:
        """Context manager that joins a group; the member leaves at the end, or when it awaits
        `all_done`."""
        membership = Membership(self._open, key)
        try:
            yield membership
        finally:
            membership.leave()


class Membership:
    """A member of a group: makes something durable, then waits to report with the others."""

    def __init__(self, open_groups: dict[Hashable, _Group], key: Hashable) -> None:
        self._open, self._key = open_groups, key
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()
        self._group = open_groups.setdefault(key, _Group())
        self._group.num_missing += 1
        self._is_missing = True

    async def all_done(self) -> None:
        """Mark this member as done, and wait a bounded time for the others, so that all report in
        one turn of the event loop."""
        self.leave()
        patience_s = min(self._loop.time() - self._since_s, LONGEST_WAIT_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._group.all_done.wait()

    def leave(self) -> None:
        """Leave the group, so that no other member waits for this one."""
        if not self._is_missing:
            return
        self._is_missing = False
        if self._open.get(self._key) is self._group:
            del self._open[self._key]
        self._group.num_missing -= 1
        if self._group.num_missing == 0:
            self._group.all_done.set()
