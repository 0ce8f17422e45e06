"""Tunnels: connections to workers that cannot be dialled, over streams that the workers keep open.

A worker behind a firewall opens Relay and waits: its stream is parked. To reach it the coordinator
dials a private unix socket; the hub takes a parked stream and copies bytes both ways. One stream
carries one connection with its TLS, so the hub proves and learns nothing: a stolen stream only
carries bytes that its thief cannot read.
"""

import asyncio
import hashlib
import os
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import structlog

from stratagem.common.base.errors import (
    InvalidInputError,
    LimitError,
    UnavailableError,
    WrongStateError,
)
from stratagem.common.base.ids import WorkerId
from stratagem.common.rpc.admission import RETRY_AFTER_S
from stratagem.common.rpc.streams import Receive, Send, SocketFolder, copy_both_ways
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.runtime.supervisor import Chores

MAX_PARKED: Final = 4
"""The most parked streams per worker process."""
MAX_LIVE: Final = 16
"""The most connections per worker process that are open or wait for a stream."""
MAX_STREAMS: Final = 20_000
"""The most streams of all workers together."""
PARKED_FOR_S: Final = 240.0
"""The time after which a parked stream is replaced: NAT drops connections that are silent for
longer."""
DIAL_WAIT_S: Final = 10.0
"""The longest wait of a dialled connection for a stream; gRPC allows 20 s to connect."""
_ACCEPT_PAUSE_S: Final = 1.0
"""The pause after a failed accept, for example if file descriptors have run out."""

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class _Dial:
    """A dialled connection that waits for a parked stream."""

    connection: socket.socket
    matched: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False, slots=True)
class _Lot:
    """The streams of one worker process, and the socket at which the coordinator dials it."""

    member: Member
    path: str
    listener: socket.socket
    emptied_s: float
    """The time when the worker's last stream ended or, without one, when this record was made."""
    had_streams: bool = False
    parked: list[asyncio.Future[socket.socket]] = field(default_factory=list)
    """The parked streams; each future receives the connection that its stream must carry."""
    dials: deque[_Dial] = field(default_factory=deque)
    num_live: int = 0
    accepting: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return not (self.parked or self.dials or self.num_live)

    def match(self) -> None:
        """Give the newest parked streams, the likeliest to work, to the longest waiting dials."""
        while self.dials and self.parked:
            dial = self.dials.popleft()
            self.num_live += 1
            self.parked.pop().set_result(dial.connection)
            dial.matched.set()


class RelayHub:
    """The streams that workers keep open to this coordinator; for the event loop only."""

    def __init__(
        self,
        is_registered: Callable[[Member], bool],
        *,
        is_on: bool = True,
        parked_for_s: float = PARKED_FOR_S,
        dial_wait_s: float = DIAL_WAIT_S,
    ) -> None:
        """Begin without streams. is_registered: returns whether runs may use this process."""
        self._is_registered, self._is_on = is_registered, is_on
        self._parked_for_s, self._dial_wait_s = parked_for_s, dial_wait_s
        self._lots: dict[Member, _Lot] = {}
        self._starts: defaultdict[WorkerId, set[Member]] = defaultdict(set)
        self._folder = SocketFolder()
        self._chores = Chores()
        self._num_streams = 0
        self.num_bytes = 0
        """The number of bytes carried so far, in both directions together."""

    # ---- questions of the coordinator ----

    def check_on(self) -> None:
        """Raise WrongStateError if this coordinator does not accept tunnels."""
        if not self._is_on:
            raise WrongStateError("this coordinator takes no tunnels: it was started --relay off")

    def target(self, member: Member) -> str:
        """Return the gRPC target that reaches a worker through its tunnel."""
        return f"unix:{self._lot(member).path}"

    def check_open(self, member: Member) -> None:
        """Raise UnavailableError if the worker had no open stream for as long as a dial waits."""
        if silence := self.silence(member):
            raise UnavailableError(silence)

    def silence(self, member: Member) -> str:
        """Return the text of an error if a worker keeps no stream open; "" otherwise."""
        lot = self._lots.get(member)
        if lot is None:
            return f"worker {member.worker_id} keeps no tunnel open"
        silent_s = time.monotonic() - lot.emptied_s
        if lot.parked or lot.num_live or silent_s < self._dial_wait_s:
            return ""
        last = f"last one {silent_s:.0f} s ago" if lot.had_streams else f"none for {silent_s:.0f} s"
        return f"worker {member.worker_id} keeps no tunnel open ({last})"

    def counts(self) -> Counter[str]:
        """Return the number of tunnel streams, per state."""
        lots = self._lots.values()
        return Counter(
            parked=sum(len(lot.parked) for lot in lots), live=sum(lot.num_live for lot in lots)
        )

    def forget(self, member: Member) -> None:
        """Close the socket of a worker process that is gone, at once or after its last stream."""
        if member in self._lots:
            self._tidy(self._lots[member])

    def forget_others(self, member: Member) -> None:
        """Close the sockets of earlier processes of a newly registered worker; see `forget`."""
        for other in self._others(member):
            self.forget(other)

    async def close(self) -> None:
        """End all tunnel streams."""
        for lot in list(self._lots.values()):
            self._drop(lot)
        await self._chores.close()
        self._folder.close()

    # ---- streams ----

    async def carry(
        self,
        member: Member,
        receive: Receive,
        send: Send,
        say_parked: Callable[[], Awaitable[None]],
    ) -> None:
        """Park a stream and, once it is needed, copy its connection until either side ends.

        Raises LimitError for too many streams, and WrongStateError if there may be none.
        """
        self.check_on()
        self._replace_others(member)
        _check_room(self._num_streams, MAX_STREAMS, "are open")
        lot = self._lot(member)
        _check_room(len(lot.parked), MAX_PARKED, f"of worker {member.worker_id} are parked")
        wanted: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        lot.had_streams = True
        lot.parked.append(wanted)
        self._num_streams += 1
        ahead = _ReadAhead(receive)
        try:
            await say_parked()
            lot.match()
            await asyncio.wait(
                (wanted, ahead.task),
                timeout=self._parked_for_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if wanted.done() and not wanted.cancelled():
                connection = wanted.result()
                await copy_both_ways(connection, self._counted(ahead.receive), self._counting(send))
            else:
                ahead.check_silent()
        finally:
            await ahead.close()
            self._end(lot, wanted)

    def _end(self, lot: _Lot, wanted: asyncio.Future[socket.socket]) -> None:
        self._num_streams -= 1
        if wanted in lot.parked:
            lot.parked.remove(wanted)
        elif not wanted.cancelled():
            wanted.result().close()
            lot.num_live -= 1
        lot.emptied_s = time.monotonic()
        self._tidy(lot)

    def _replace_others(self, member: Member) -> None:
        """End the streams of other processes of a worker, except the registered one, which counts
        as alive until it does not answer."""
        for other in self._others(member):
            if not self._is_registered(other):
                self._drop(self._lots[other])

    def _others(self, member: Member) -> set[Member]:
        return self._starts.get(member.worker_id, set()) - {member}

    def _counted(self, receive: Receive) -> Receive:
        async def counted() -> bytes | None:
            data = await receive()
            self.num_bytes += len(data or b"")
            return data

        return counted

    def _counting(self, send: Send) -> Send:
        async def counting(data: bytes) -> None:
            await send(data)
            self.num_bytes += len(data)

        return counting

    # ---- dials ----

    async def _accept(self, lot: _Lot) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(lot.listener)
            except OSError as error:
                log.warning("cannot accept a dial", worker=lot.member.worker_id, reason=str(error))
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            connection.setblocking(False)
            self._chores.do(self._connect(lot, connection), f"dial {lot.member.worker_id}")

    async def _connect(self, lot: _Lot, connection: socket.socket) -> None:
        """Have a parked stream carry a dialled connection; close it if no stream comes."""
        if lot.num_live + len(lot.dials) >= MAX_LIVE:
            log.warning("too many connections", worker=lot.member.worker_id, limit=MAX_LIVE)
            connection.close()
            return
        dial = _Dial(connection)
        lot.dials.append(dial)
        lot.match()
        try:
            async with asyncio.timeout(self._dial_wait_s):
                await dial.matched.wait()
        except TimeoutError:
            log.info("no stream for a dial", worker=lot.member.worker_id)
        finally:
            if dial in lot.dials:
                lot.dials.remove(dial)
                connection.close()
                self._tidy(lot)

    # ---- lots ----

    def _lot(self, member: Member) -> _Lot:
        if member in self._lots:
            return self._lots[member]
        name = hashlib.sha256(f"{member.worker_id}/{member.incarnation}".encode()).hexdigest()
        path = self._folder.path(f"{name[:16]}.sock")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(path)
        listener.listen(MAX_LIVE)
        lot = self._lots[member] = _Lot(member, path, listener, time.monotonic())
        self._starts[member.worker_id].add(member)
        lot.accepting = asyncio.create_task(self._accept(lot))
        return lot

    def _tidy(self, lot: _Lot) -> None:
        """Drop the socket and streams of a worker process that nobody needs any more."""
        if lot.is_idle and not self._is_registered(lot.member):
            self._drop(lot)

    def _drop(self, lot: _Lot) -> None:
        """Close a worker's socket, and end its parked streams; connections end by themselves."""
        if self._lots.get(lot.member) is not lot:
            return
        del self._lots[lot.member]
        self._starts[lot.member.worker_id].discard(lot.member)
        if not self._starts[lot.member.worker_id]:
            del self._starts[lot.member.worker_id]
        if lot.accepting is not None:
            lot.accepting.cancel()
        lot.listener.close()
        with suppress(OSError):
            os.unlink(lot.path)
        while lot.parked:
            lot.parked.pop().cancel()


class _ReadAhead:
    """A stream whose next frame is read ahead, so that the end of the stream is noticed."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.task = asyncio.ensure_future(receive())
        self._is_given = False

    async def receive(self) -> bytes | None:
        """Return the next frame; None at the end of the stream."""
        if self._is_given:
            return await self._receive()
        self._is_given = True
        return await self.task

    def check_silent(self) -> None:
        """Raise an error if the parked stream has failed, or the worker has sent bytes."""
        if self.task.done() and self.task.result() is not None:
            raise InvalidInputError.at("data", "came before the coordinator said anything")

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def _check_room(num: int, limit: int, are: str) -> None:
    if num >= limit:
        message = f"relay: {num} streams {are}, the limit is {limit}"
        raise LimitError(message, retry_after_s=RETRY_AFTER_S)
