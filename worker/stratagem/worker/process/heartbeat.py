"""Register this worker with the coordinator and keep its lease alive by heartbeats.

Both use a separate channel, so that no tensor stream can hold them up. If the coordinator is
unreachable, the worker waits for it, and training continues meanwhile.
"""

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc
import structlog

from stratagem.common.base.errors import StratagemError
from stratagem.common.observe.logs import identify
from stratagem.common.rpc.channel import (
    PLAINTEXT,
    CoordinatorChannel,
    Coordinators,
    Proof,
    open_channel,
    write_message,
)
from stratagem.common.rpc.probe import identity_problem
from stratagem.common.rpc.status_codes import name_of
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from stratagem.worker.host.clock import CoordinatorClock, new_backoff

if TYPE_CHECKING:
    from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceAsyncStub

# ---- Heartbeat stream ----
#
# A worker sends heartbeats over one standing call, at the interval that the coordinator sets. The
# coordinator answers each, and may send requests in between. `BeatStream` handles one call from its
# first message to its end; its caller decides what follows.

LEAST_TIMEOUT_S: Final = 1.0
"""Minimum timeout of a heartbeat, which otherwise is one interval."""

_jitter: Final = random.Random()  # the shared generator belongs to the user's code


def spread_s(interval_s: float) -> float:
    """Return a random fraction of the interval, so that workers that were cut off together do not
    call at the same time."""
    return _jitter.uniform(0.0, interval_s)


@dataclass(slots=True)
class BeatStream:
    """A call over which heartbeats are sent until it ends."""

    first: pb.HeartbeatStreamRequest
    """The first message, with the worker's identity."""
    interval_s: float
    """Seconds between heartbeats, as last set by the coordinator."""
    beat_now: asyncio.Event
    """Set to request the next heartbeat at once."""
    drain_said: asyncio.Event
    """Set once a heartbeat that announces the drain was answered, or has ended the call."""
    is_draining: Callable[[], bool]
    is_over: Callable[[], bool]
    """Returns whether to stop sending heartbeats."""
    on_answer: Callable[[pb.HeartbeatStreamResponse, float | None], None]
    """Called with each answer, and when the answered heartbeat was sent, None without one."""
    num_answered: int = 0
    _num_sent: int = 0
    _says_drain: bool = False
    """True if the last heartbeat announces the drain."""
    _sent_s: float = 0.0
    _answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, stub: "CoordinatorServiceAsyncStub") -> None:
        """Send heartbeats until is_over, or until the coordinator ends the call with OK. Raises
        AioRpcError for other ends, and TimeoutError if no answer comes."""
        call: Any = stub.HeartbeatStream()
        reading = asyncio.create_task(self._read(call))
        reading.add_done_callback(self._wake)
        try:
            await self._beat(call, reading)
        finally:
            reading.remove_done_callback(self._wake)  # not a request for a heartbeat
            self._note_drain()
            call.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _wake(self, _reading: "asyncio.Task[None]") -> None:
        self._answered.set()
        self.beat_now.set()

    async def _read(self, call: Any) -> None:
        while (answer := await call.read()) is not grpc.aio.EOF:
            is_of_beat = answer.num_beats == self._num_sent > self.num_answered
            self.interval_s = answer.interval_s or self.interval_s
            self.on_answer(answer, self._sent_s if is_of_beat else None)
            if is_of_beat:
                self.num_answered = answer.num_beats
                self._note_drain()
                self._answered.set()

    def _note_drain(self) -> None:
        if self._says_drain:
            self.drain_said.set()

    async def _beat(self, call: Any, reading: "asyncio.Task[None]") -> None:
        while not self.is_over():
            self.beat_now.clear()  # a request during the heartbeat is for the next one
            self._answered.clear()
            if reading.done():
                reading.result()
                return
            beat = pb.HeartbeatStreamRequest(draining=self.is_draining())
            if not self._num_sent:
                beat.MergeFrom(self.first)
            self._says_drain = beat.draining
            async with asyncio.timeout(max(self.interval_s, LEAST_TIMEOUT_S)):
                await call.wait_for_connection()
                self._num_sent, self._sent_s = self._num_sent + 1, time.time()
                await write_message(call, beat)
                await self._answered.wait()
            # Workers that began together continue at different times.
            is_first = self._num_sent == 1
            await self._pause(spread_s(self.interval_s) if is_first else self.interval_s)

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self.beat_now.wait()
        except TimeoutError:
            return


# ---- Registration and heartbeats ----

log = structlog.get_logger(__name__)

CALL_TIMEOUT_S: Final = 10.0
LONGEST_TIMEOUT_S: Final = 60.0
"""Maximum timeout of a registration; it grows with each attempt, since thousands of workers that
start together delay each other."""
LEAVE_TIMEOUT_S: Final = 2.0
REMIND_S: Final = 60.0
"""Seconds after which a lasting failure is logged again; doubled each time."""
SELDOM_S: Final = 3600.0
"""Maximum seconds between two logs of a lasting failure."""
LOOK_AGAIN_EVERY: Final = 10
"""Consecutive failures after which the connection is examined again for an identity problem."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity that this process registers with the coordinator."""

    worker_id: str
    incarnation: str
    address: str
    capability: types_pb2.Capability
    previous_exit: pb.PreviousExit = field(default_factory=pb.PreviousExit)
    """The end of the previous process, as far as this process knows."""


@dataclass(slots=True)
class Agent:
    """Registers this process and sends its heartbeats; one per process, run as a task."""

    coordinators: Coordinators
    identity: Identity
    see_term: Callable[[int], None]
    clock: CoordinatorClock
    proof: Proof = PLAINTEXT
    proxy: str = ""
    on_registered: Callable[[], None] = lambda: None
    on_store: Callable[[str], None] = lambda _: None
    """Called at each registration with the id of the coordinator's folder of states, or ""."""
    for_run: str = ""
    """The run for which this process was started."""
    on_released: Callable[[], None] = lambda: None
    """Called when that run has ended."""
    on_unknown: Callable[[], None] = lambda: None
    """Called instead if the coordinator does not know the run and has not known it since this
    process started."""
    is_registered: asyncio.Event = field(default_factory=asyncio.Event)
    heard_s: float = field(default_factory=time.monotonic)
    """Time of the coordinator's last answer; initially the start of this process."""
    _told_s: float = 0.0
    """Time at which the present failure was last logged."""
    _silent_s: float = REMIND_S
    """Seconds until the present failure is logged again."""
    _has_known_run: bool = False
    _is_draining: bool = False
    _beat_now: asyncio.Event = field(default_factory=asyncio.Event)
    _has_said_drain: asyncio.Event = field(default_factory=asyncio.Event)
    _why_leaving: str = ""
    _has_left: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Register, then send heartbeats; register again if the coordinator has forgotten this
        worker. Returns when this worker has left."""
        open_own = partial(open_channel, proof=self.proof, own_connection=True, proxy=self.proxy)
        async with CoordinatorChannel(self.coordinators, open_own) as channel:
            stub = CoordinatorServiceStub(channel)
            while True:
                answer = await self._register(stub)
                self._see(answer.term)
                self.on_registered()
                self.on_store(answer.store_id)
                self.is_registered.set()
                await self._beat(stub, answer.heartbeat_interval_s)
                if self._why_leaving:
                    await self._leave(stub)
                    self._has_left.set()
                    return
                self.is_registered.clear()

    def _see(self, term: int) -> None:
        """Note that the coordinator has answered, and its leadership term."""
        self.see_term(term)
        self.heard_s = time.monotonic()
        identify(term=term)

    def drain(self) -> None:
        """Announce the drain in every heartbeat from now on, beginning at once."""
        self._is_draining = True
        self._beat_now.set()

    def beat(self) -> None:
        """Request a heartbeat at once."""
        self._beat_now.set()

    async def until_drain_is_announced(self) -> None:
        """Wait until a heartbeat that announces the drain was answered, or has failed."""
        if self.is_registered.is_set():
            await self._has_said_drain.wait()

    async def leave(self, reason: str) -> None:
        """Stop the heartbeats, and tell a reachable coordinator that this worker leaves."""
        if self.is_registered.is_set():
            self._why_leaving = reason
            self._beat_now.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await self._has_left.wait()

    async def _leave(self, stub: "CoordinatorServiceAsyncStub") -> None:
        request = pb.LeaveRequest(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            reason=self._why_leaving,
        )
        for _ in self.coordinators.addresses:  # each may be the leader
            asked = self.coordinators.present
            try:
                await stub.Leave(request, timeout=LEAVE_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as error:
                # The lease will end, and the coordinator knows of the drain.
                await self._report(1, "cannot say that this worker leaves", error, asked)

    async def _register(self, stub: "CoordinatorServiceAsyncStub") -> pb.RegisterWorkerResponse:
        request = pb.RegisterWorkerRequest(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            address=self.identity.address,
            capability=self.identity.capability,
        )
        if self.identity.previous_exit.incarnation:
            request.previous_exit.CopyFrom(self.identity.previous_exit)
        attempt, backoff, timeout_s = 0, new_backoff(), CALL_TIMEOUT_S
        while True:
            asked = self.coordinators.present
            try:
                answer = await stub.RegisterWorker(request, timeout=timeout_s)
                log.info("registered", coordinator=self.coordinators.present, term=answer.term)
                return answer
            except grpc.aio.AioRpcError as error:
                await self._report(attempt, "cannot register", error, asked)
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    timeout_s = min(2 * timeout_s, LONGEST_TIMEOUT_S)
            await backoff.pause()
            attempt += 1

    async def _beat(self, stub: "CoordinatorServiceAsyncStub", interval_s: float) -> None:
        """Send heartbeats until this worker leaves, or is unknown to the coordinator."""
        num_failed = 0
        while not self._why_leaving:
            asked, began_s = self.coordinators.present, time.monotonic()
            stream = self._stream(interval_s)
            error = await self._beat_on(stream, stub)
            if getattr(error, "code", lambda: None)() is grpc.StatusCode.NOT_FOUND:
                log.info("the coordinator does not know this worker; registering again")
                return
            interval_s = stream.interval_s
            num_failed = 0 if stream.num_answered else num_failed
            if error is not None:
                await self._report(num_failed, "heartbeat failed", error, asked)
                num_failed += 1
            if error is not None or time.monotonic() - began_s < interval_s:
                await self._pause(spread_s(interval_s))

    async def _beat_on(
        self, stream: BeatStream, stub: "CoordinatorServiceAsyncStub"
    ) -> Exception | None:
        """Send heartbeats over a stream until it ends; return its error, None if regular."""
        try:
            await stream.run(stub)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                return error
            return await self._beat_singly(stream, stub)  # the coordinator has an earlier version
        except (StratagemError, TimeoutError) as error:
            return error
        return None

    def _stream(self, interval_s: float) -> BeatStream:
        first = pb.HeartbeatStreamRequest(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            for_run=self.for_run,
        )
        return BeatStream(
            first,
            interval_s,
            self._beat_now,
            self._has_said_drain,
            is_draining=lambda: self._is_draining,
            is_over=lambda: bool(self._why_leaving),
            on_answer=self._take,
        )

    async def _beat_singly(
        self, stream: BeatStream, stub: "CoordinatorServiceAsyncStub"
    ) -> grpc.aio.AioRpcError | None:
        """Send each heartbeat as a single call, for a coordinator without the stream, until one
        fails or this worker leaves; return the error."""
        while not self._why_leaving:
            self._beat_now.clear()  # a request during the call is for the next heartbeat
            request = pb.HeartbeatRequest(
                worker_id=self.identity.worker_id,
                incarnation=self.identity.incarnation,
                draining=self._is_draining,
                for_run=self.for_run,
            )
            sent_s = time.time()
            try:
                timeout_s = max(stream.interval_s, LEAST_TIMEOUT_S)
                self._take(await stub.Heartbeat(request, timeout=timeout_s), sent_s)
                stream.num_answered += 1
            except grpc.aio.AioRpcError as error:
                return error
            finally:
                if request.draining:
                    self._has_said_drain.set()
            await self._pause(stream.interval_s)
        return None

    def _take(
        self, answer: pb.HeartbeatResponse | pb.HeartbeatStreamResponse, sent_s: float | None
    ) -> None:
        """Process an answer. sent_s: when the heartbeat was sent that it answers; None if it
        answers none."""
        if sent_s is not None and answer.time_s:  # an older coordinator does not send it
            self.clock.note(sent_s, time.time(), answer.time_s)
        self._see(answer.term)
        is_unknown = isinstance(answer, pb.HeartbeatStreamResponse) and answer.run_unknown
        self._has_known_run = self._has_known_run or not is_unknown
        if answer.released:
            (self.on_released if self._has_known_run else self.on_unknown)()

    async def _pause(self, interval_s: float) -> None:
        try:
            async with asyncio.timeout(interval_s):
                await self._beat_now.wait()
        except TimeoutError:
            return

    async def _report(self, num_before: int, what: str, error: Exception, asked: str) -> None:
        """Log a failure: the first of a series as a warning, later ones as warnings at growing
        intervals, else as debug.

        After a timeout switch to the next coordinator, if any, since a frozen one answers nothing.
        Problems of identity are always warnings.
        """
        if not isinstance(error, grpc.aio.AioRpcError):
            level = log.warning if self._is_warning(num_before) else log.debug
            level(what, reason=str(error) or "no answer in time")
            if isinstance(error, TimeoutError):
                self.coordinators.move_on(asked)
            return
        details = error.details()
        if num_before % LOOK_AGAIN_EVERY == 0 and not name_of(error):
            details = await identity_problem(error, asked, self.proof, proxy=self.proxy) or details
        is_news = self._is_warning(num_before) or details != error.details()
        level = log.warning if is_news else log.debug
        level(what, code=error.code().name, details=details)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self.coordinators.move_on(asked)

    def _is_warning(self, num_before: int) -> bool:
        """Return whether to log this failure as a warning: the first of a series, and later ones at
        doubling intervals."""
        now_s = time.monotonic()
        if num_before and now_s - self._told_s < self._silent_s:
            return False
        self._silent_s = min(2 * self._silent_s, SELDOM_S) if num_before else REMIND_S
        self._told_s = now_s
        return True
