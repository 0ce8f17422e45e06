"""The leases of the workers: heartbeats renew them, one timer expires them, and nothing journals
them.

Only the loss of a worker after its lease expires is a fact. When a coordinator takes over, every
worker that is alive according to the journal gets a full ttl. Nothing expires while no coordinator
leads, nor while this process is frozen, because the leader's clock leaves that time out.
"""

import asyncio
import math
import random
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import grpc.aio

from stratagem.common.base.errors import InvalidInputError, NotFoundError, UnavailableError
from stratagem.common.base.ids import RunId
from stratagem.common.process.process import HEARTBEATS_PER_TTL
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.runtime.supervisor import Chores
from stratagem.v1 import coordinator_pb2 as pb

# ---- Pace ----
#
# The interval of heartbeats and the length of leases depend on the number of workers alive.
#
# A beat costs the coordinator the same whichever worker sends it, so with thousands of workers
# each one beats less often, and the leases grow with the interval. The rule is a pure function.

BEATS_PER_S: Final = 500.0
"""The most heartbeats per second of all workers together; with more workers the interval grows."""
LONGEST_INTERVAL_S: Final = 10.0
"""The upper bound on how far a large number of workers stretches the heartbeat interval."""


@dataclass(frozen=True, slots=True)
class HeartbeatPace:
    """A worker's heartbeat interval, and the silence after which it counts as lost; in seconds."""

    interval_s: float
    ttl_s: float


@dataclass(frozen=True, slots=True)
class PaceRule:
    """The rule for the heartbeat pace: values for a few workers, from which those for many follow;
    in seconds."""

    shortest_s: float
    ttl_s: float

    def of(self, num_alive: int) -> HeartbeatPace:
        """Return the pace for a number of live workers. A longer interval makes leases longer, too,
        so that a lease survives as many late heartbeats as with a few workers."""
        many_s = min(num_alive / BEATS_PER_S, LONGEST_INTERVAL_S)
        return self.pace(max(self.shortest_s, many_s))

    def pace(self, interval_s: float) -> HeartbeatPace:
        """Return the pace with this heartbeat interval, which must be at least shortest_s."""
        more_s = interval_s - self.shortest_s
        return HeartbeatPace(interval_s, self.ttl_s + HEARTBEATS_PER_TTL * more_s)


# ---- Leases ----


class _Lease(NamedTuple):
    """A lease: the leader time of the last heartbeat, and the silence after which it expires."""

    beat_s: float
    ttl_s: float

    @property
    def end_s(self) -> float:
        return self.beat_s + self.ttl_s


class Leases:
    def __init__(
        self,
        rule: PaceRule,
        clock: Callable[[], float],
        lose: Callable[[Member, str, float], Awaitable[object]],
        on_drop: Callable[[Member], None] = lambda _member: None,
    ) -> None:
        """Begin without leases. clock: returns the leader time. lose: called with a member whose
        lease has expired, the reason, and the seconds since its last heartbeat. on_drop: called
        when any lease ends."""
        self.rule = rule
        self._clock = clock
        self._lose = lose
        self._on_drop = on_drop
        self._leases: dict[Member, _Lease] = {}
        self._planned_s = -math.inf
        """The leader time at which the leases are checked next."""
        self._sooner = asyncio.Event()
        self._is_deaf = False

    @property
    def pace(self) -> HeartbeatPace:
        """Return the current heartbeat interval and lease length."""
        return self.rule.of(len(self._leases))

    def grant(self, members: Iterable[Member], ttl_s: float) -> None:
        """Give each of these members a new lease that starts now."""
        for member in members:
            self._set(member, ttl_s)

    def suspend(self) -> None:
        """Stop expiring leases: no heartbeat can arrive from now on."""
        self._is_deaf = True

    def resume(self) -> None:
        """Expire leases again; each starts again with its full ttl."""
        self._is_deaf = False
        for member, lease in list(self._leases.items()):
            self._set(member, lease.ttl_s)
        self._sooner.set()

    def renew(self, member: Member, ttl_s: float) -> bool:
        """Renew a member's lease; return False if the member has none (any more)."""
        if member not in self._leases:
            return False
        self._set(member, ttl_s)
        return True

    def drop(self, member: Member) -> None:
        """End the lease of a member that was lost or replaced; its later heartbeats are ignored."""
        self._leases.pop(member, None)
        self._on_drop(member)

    def silent_s(self, member: Member) -> float | None:
        """Return the seconds since the member's last heartbeat; None if it has no lease."""
        lease = self._leases.get(member)
        return None if lease is None else self._clock() - lease.beat_s

    def longest_silence_s(self) -> float:
        """Return the seconds since the oldest last heartbeat of any member; 0 without members."""
        now_s = self._clock()
        return now_s - min((lease.beat_s for lease in self._leases.values()), default=now_s)

    async def expire(self) -> None:
        """Watch for expired leases and report them as lost, until cancelled."""
        while True:
            expired = self._expired()
            for member, _ in expired:
                self.drop(member)
            # Losses that are decided together share one transaction.
            now_s = self._clock()
            losses = (
                self._lose(member, f"no heartbeat for {lease.ttl_s:g} s", now_s - lease.beat_s)
                for member, lease in expired
            )
            await asyncio.gather(*losses)
            await self._until_next()

    def _expired(self) -> list[tuple[Member, _Lease]]:
        now, leases = self._clock(), {} if self._is_deaf else self._leases
        return [(member, lease) for member, lease in leases.items() if lease.end_s <= now]

    def _set(self, member: Member, ttl_s: float) -> None:
        lease = self._leases[member] = _Lease(self._clock(), ttl_s)
        if lease.end_s < self._planned_s:
            self._sooner.set()

    async def _until_next(self) -> None:
        """Sleep until the first lease expires, or a lease that ends sooner is granted; renewals do
        not wake this task."""
        self._sooner.clear()
        ends = () if self._is_deaf else self._leases.values()
        self._planned_s = min((lease.end_s for lease in ends), default=math.inf)
        wait_s = max(0.01, self._planned_s - self._clock())
        try:
            async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                await self._sooner.wait()
        except TimeoutError:
            return


# ---- Streams ----
#
# Workers send their heartbeats over standing calls, one for each start of a worker.
#
# A message on an open stream costs a fraction of a call. Each message renews the lease and is
# answered with the pace for the present number of workers. The end of the run that a worker was
# started for cannot wait for a beat and is sent at once. A broken stream has no consequence: the
# lease decides.

LEAST_GAP_S: Final = 0.05
"""The minimum gap between two heartbeats of a stream; faster ones are delayed by flow control."""
LASTS_S: Final = 900.0
"""The maximum life of a stream, so that the next one connects with the newest certificate."""

Receive = Callable[[], Awaitable[pb.HeartbeatStreamRequest | None]]
Send = Callable[[pb.HeartbeatStreamResponse], Awaitable[None]]

_jitter: Final = random.Random()


@dataclass(frozen=True, slots=True)
class Wire:
    """The two ends of one heartbeat call: receive and send. check_caller: raises if the caller's
    identity is no longer valid."""

    receive: Receive
    send: Send
    check_caller: Callable[[], None]


@dataclass(eq=False, slots=True)
class _Stream:
    member: Member
    for_run: RunId
    send: Send
    interval_s: float
    """The heartbeat interval that was last sent to the worker."""
    limit: asyncio.Timeout
    num_beats: int = 0
    is_draining: bool = False
    has_ended: bool = False
    why: Exception | None = None
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def end(self, why: Exception | None) -> None:
        """End the call, whatever it is waiting for: with OK, or with the error `why`."""
        if not self.has_ended:
            self.has_ended, self.why = True, why
            self.limit.reschedule(asyncio.get_running_loop().time())


class HeartbeatStreams:
    """The heartbeat streams that workers keep open. Not thread-safe: runs on the event loop."""

    def __init__(
        self,
        leases: Leases,
        term: int,
        is_over: Callable[[RunId], bool],
        is_known: Callable[[RunId], bool],
        drain: Callable[[Member], Awaitable[object]],
        *,
        lasts_s: float = LASTS_S,
    ) -> None:
        """Begin without streams. is_over: returns True if a run has ended or is unknown. drain:
        called when a worker announces that it is draining."""
        self._leases, self._term, self._drain = leases, term, drain
        self._is_over, self._is_known = is_over, is_known
        self._lasts_s = lasts_s
        self._streams: dict[Member, _Stream] = {}
        self._for_run: defaultdict[RunId, set[_Stream]] = defaultdict(set)
        self._chores = Chores()

    @property
    def num_open(self) -> int:
        """Return the number of open streams."""
        return len(self._streams)

    async def serve(
        self, member: Member, for_run: RunId, first: pb.HeartbeatStreamRequest, wire: Wire
    ) -> None:
        """Receive a worker's heartbeats, first message included, until either side ends the call.

        Raises NotFoundError once the worker is not registered (any more).
        """
        shortest_s = self._leases.rule.shortest_s
        stream = _Stream(member, for_run, wire.send, shortest_s, asyncio.timeout(None))
        try:
            async with stream.limit:
                self._open(stream)
                try:
                    await self._take_beats(stream, first, wire)
                finally:
                    self._close(stream)
        except TimeoutError:
            if not stream.has_ended:
                raise
            if stream.why is not None:
                raise stream.why from None

    def end(self, member: Member) -> None:
        """End the stream of a member that has no lease any more."""
        if member in self._streams:
            self._streams[member].end(_unknown(member))

    def end_all(self, why: Exception) -> None:
        """End all streams with an error; the workers then find out who leads."""
        for stream in list(self._streams.values()):
            stream.end(why)

    def tell_released(self, run_id: RunId) -> None:
        """Tell the workers that were started for this run that the run is over."""
        for stream in self._for_run.get(run_id, ()):
            self._chores.do(self._push(stream), f"release {stream.member.worker_id}")

    async def close(self) -> None:
        """End all streams because this coordinator shuts down."""
        self.end_all(UnavailableError("this coordinator ends"))
        await self._chores.close()

    def _open(self, stream: _Stream) -> None:
        older = self._streams.get(stream.member)
        if older is not None:
            older.end(None)
        self._streams[stream.member] = stream
        if stream.for_run:
            self._for_run[stream.for_run].add(stream)

    def _close(self, stream: _Stream) -> None:
        stream.has_ended = True
        if self._streams.get(stream.member) is stream:
            del self._streams[stream.member]
        if stream.for_run:
            self._for_run[stream.for_run].discard(stream)
            if not self._for_run[stream.for_run]:
                del self._for_run[stream.for_run]

    async def _take_beats(
        self, stream: _Stream, first: pb.HeartbeatStreamRequest, wire: Wire
    ) -> None:
        now_s = asyncio.get_running_loop().time
        # Streams that were opened together should not be opened again together.
        end_s = now_s() + self._lasts_s * _jitter.uniform(0.5, 1.0)
        beat: pb.HeartbeatStreamRequest | None = first
        while beat is not None:
            came_s = now_s()
            wire.check_caller()
            await self._take(stream, beat)
            if came_s >= end_s:
                return
            beat = await wire.receive()
            if beat is not None:
                _check_nameless(beat)
                if (early_s := came_s + LEAST_GAP_S - now_s()) > 0:
                    await asyncio.sleep(early_s)

    async def _take(self, stream: _Stream, beat: pb.HeartbeatStreamRequest) -> None:
        pace = self._leases.pace
        # Until the worker has read this answer it keeps its former interval.
        slowest_s = max(pace.interval_s, stream.interval_s)
        if not self._leases.renew(stream.member, self._leases.rule.pace(slowest_s).ttl_s):
            raise _unknown(stream.member)
        stream.interval_s = pace.interval_s
        if beat.draining and not stream.is_draining:
            stream.is_draining = True
            await self._drain(stream.member)
        stream.num_beats += 1
        await self._say(stream)

    async def _say(self, stream: _Stream) -> None:
        released = bool(stream.for_run) and self._is_over(stream.for_run)
        async with stream.writing:
            await stream.send(
                pb.HeartbeatStreamResponse(
                    term=self._term,
                    time_s=time.time(),
                    num_beats=stream.num_beats,
                    interval_s=stream.interval_s,
                    lease_ttl_s=self._leases.rule.pace(stream.interval_s).ttl_s,
                    released=released,
                    run_unknown=released and not self._is_known(stream.for_run),
                )
            )

    async def _push(self, stream: _Stream) -> None:
        with suppress(grpc.aio.BaseError):  # it has just ended; the next one begins with the news
            await self._say(stream)


def _unknown(member: Member) -> NotFoundError:
    return NotFoundError(f"worker {member.worker_id!r} is not registered (any more)")


def _check_nameless(beat: pb.HeartbeatStreamRequest) -> None:
    for name in ("worker_id", "incarnation", "for_run"):
        if getattr(beat, name):
            text = "is said in the first message of the stream, and not again"
            raise InvalidInputError.at(name, text)
