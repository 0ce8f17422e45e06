"""Messages between members of one host, through memory that both ends have mapped.

The sender owns slots: anonymous segments, made when none is free and passed over a Unix socket. It
copies a message into one and announces it; the receiver copies it out at its next look and returns
the slot. No sender waits for a computing receiver: a message without a slot stays here until the
sender's next call. Both look only while they send or wait, so there is no thread that takes a core
from computing.
"""

import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from torch import Tensor

from stratagem.common.base.errors import IntegrityError, StratagemError
from stratagem.common.tensors.torch_codec import bytes_of
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.mesh.mailbox import MAX_EARLY_BYTES, Mailbox, Route
from stratagem.worker.mesh.shm import UnshareableError, allocate, map_segment, shut_down

MAX_SLOT_BYTES: Final = 256 * 2**20
"""Maximum size of all slots of one direction between two members; one message always fits."""
_PAGE_BYTES: Final = 4096
_MAX_FDS: Final = 64
_READ_BYTES: Final = 4096


class _Kind(IntEnum):
    SLOT = 1
    """A new slot, whose file descriptor comes with the notice or before it."""
    MESSAGE = 2
    FREE = 3
    """The receiver has copied the message out of the slot."""
    DROP = 4
    """The slot is not used any more."""


_NOTICE: Final = struct.Struct("=BIqQQ")  # kind, slot, step, tag, bytes


@dataclass(slots=True)
class _Slot:
    number: int
    room: memoryview
    is_free: bool = True


class SlotLink:
    """Link for messages over shared memory, with a socket and slots per peer. Used by one thread,
    except `cut`."""

    name = "shm"

    def __init__(
        self,
        rank: int,
        size: int,
        sockets: Mapping[int, socket.socket],
        max_slot_bytes: int = MAX_SLOT_BYTES,
    ) -> None:
        self.rank, self.size = rank, size
        self._box = Mailbox(MAX_EARLY_BYTES)
        self._ways = {
            peer: _Way(rank, peer, sock, self._box, max_slot_bytes)
            for peer, sock in sockets.items()
        }
        self._lock = threading.Lock()
        self._is_closed = False  # guarded by _lock, as is the closing of sockets

    def send(self, peer: int, tag: int, tensor: Tensor, step: int = 0) -> "ShmTransfer":
        """Start a send without waiting. tensor: bytes, which must not change before the end of
        `wait`. Raises UnshareableError if there is no memory for it; nothing is sent then."""
        work = ShmTransfer(self, peer, Route(self.rank, step, tag), bytes_of(tensor))
        self._ways[peer].send(work)
        return work

    def open_step(self, step: int, awaited: Iterable[tuple[int, int]]) -> None:
        """Open a step: from now on accept these messages, (source, tag), once, no older ones."""
        self._box.open_step(step, [Route(peer, step, tag) for peer, tag in awaited])

    def take(self, peer: int, step: int, tag: int, timeout_s: float) -> memoryview:
        """Return the bytes of one message, which belong to the caller. Raises ExchangeError."""
        route = Route(peer, step, tag)
        if not self.wait_until(lambda: self._box.has(route), timeout_s):
            raise ExchangeError(f"receive of {route}: nothing within {timeout_s:g} s")
        return self._box.take(route, 0.0)

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Transfer data until is_done(); return False at the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for way in self._ways.values():
                way.move()
            if is_done():
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            poll = select.poll()
            for way in self._ways.values():
                way.register(poll)
            poll.poll(max(1.0, 1000 * left_s))

    def reason(self, peer: int) -> str:
        """Return the reason why nothing can be sent to a member; "" if it can."""
        return self._box.reason or self._ways[peer].end

    def is_announced(self, work: "ShmTransfer") -> bool:
        """Return whether the message was announced to the peer."""
        return work.is_done and self._ways[work.peer].is_flushed

    def cut(self) -> None:
        """Make every wait fail soon, here and at the peers. May be called from any thread."""
        self._box.end("the link was cut")
        with self._lock:
            if not self._is_closed:
                for way in self._ways.values():
                    shut_down(way.sock)

    def close(self) -> None:
        self._box.end("the link is closed")
        with self._lock:
            self._is_closed = True
            for way in self._ways.values():
                way.close()


class ShmTransfer:
    """A send in progress: a message that waits for a slot or for its announcement."""

    __slots__ = ("_link", "data", "is_done", "peer", "route")

    def __init__(self, link: SlotLink, peer: int, route: Route, data: memoryview) -> None:
        self._link, self.peer, self.route, self.data = link, peer, route, data
        self.is_done = False
        """True once the bytes are in a slot."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the peer can receive the message. Raises ExchangeError."""
        link = self._link
        if link.is_announced(self):
            return
        link.wait_until(lambda: link.is_announced(self) or bool(link.reason(self.peer)), timeout_s)
        if not link.is_announced(self):
            reason = link.reason(self.peer) or f"not taken within {timeout_s:g} s"
            raise ExchangeError(f"send to member {self.peer}: {reason}")


class _Way:
    """The connection with one other member: socket, slots and notices."""

    def __init__(
        self, rank: int, peer: int, sock: socket.socket, box: Mailbox, max_slot_bytes: int
    ) -> None:
        self._rank, self._peer, self._box = rank, peer, box
        self._max_slot_bytes = max_slot_bytes
        self.sock = sock
        sock.setblocking(False)
        self.end = ""
        """The reason of the connection's end; "" while it is open."""
        self._waiting: deque[ShmTransfer] = deque()
        """Sends that wait for a slot."""
        self._slots: list[_Slot] = []
        """Slots that this member writes and the peer reads."""
        self._num_made = 0
        self._rooms: dict[int, memoryview] = {}
        """Slots that the peer writes, keyed by number."""
        self._out = bytearray()
        """Bytes of notices that did not fit into the socket yet."""
        self._out_fds: list[int] = []
        """File descriptors of the slots that the notices in `_out` announce."""
        self._in = bytearray()
        self._in_fds: deque[int] = deque()
        box.enter(peer)

    @property
    def is_flushed(self) -> bool:
        return not self._out

    def send(self, work: ShmTransfer) -> None:
        self._waiting.append(work)
        try:
            self._fill()
        except UnshareableError:
            self._waiting.remove(work)  # its bytes are the caller's again
            raise
        self._flush()

    def move(self) -> None:
        """Transfer as much as possible without waiting."""
        self._pull()
        self._fill()
        self._flush()

    def register(self, poll: select.poll) -> None:
        if not self.end:
            poll.register(self.sock, select.POLLIN | (select.POLLOUT if self._out else 0))

    def close(self) -> None:
        self.sock.close()
        for fd in (*self._out_fds, *self._in_fds):
            os.close(fd)
        self._out_fds.clear()
        self._in_fds.clear()
        self._rooms.clear()
        self._slots.clear()

    # ---- Sending ----

    def _fill(self) -> None:
        """Copy waiting messages to slots, oldest first."""
        while self._waiting and not self.end:
            work = self._waiting[0]
            slot = self._slot_for(len(work.data))
            if slot is None:
                return
            slot.room[: len(work.data)] = work.data
            slot.is_free = False
            route = work.route
            self._tell(_Kind.MESSAGE, slot.number, route.step, route.tag, len(work.data))
            work.is_done = True
            self._waiting.popleft()

    def _slot_for(self, size_bytes: int) -> _Slot | None:
        """Return the smallest sufficient free slot, or a new one; None if a slot must be freed
        first."""
        for only_look in (True, False):
            fitting = [s for s in self._slots if s.is_free and len(s.room) >= size_bytes]
            if fitting:
                return min(fitting, key=lambda slot: len(slot.room))
            if only_look:
                self._pull()
        capacity = _capacity_for(size_bytes)
        if self._total_bytes + capacity > self._max_slot_bytes:
            self._drop_free()
        if self._slots and self._total_bytes + capacity > self._max_slot_bytes:
            return None
        return self._make(capacity)

    @property
    def _total_bytes(self) -> int:
        return sum(len(slot.room) for slot in self._slots)

    def _drop_free(self) -> None:
        for slot in self._slots:
            if slot.is_free:
                self._tell(_Kind.DROP, slot.number)
        self._slots = [slot for slot in self._slots if not slot.is_free]

    def _make(self, capacity: int) -> _Slot | None:
        if len(self._out_fds) == _MAX_FDS:
            return None
        try:
            fd = allocate(capacity)
        except OSError as error:
            if self._slots:  # the existing ones are enough, in turn
                return None
            text = f"cannot allocate {capacity} bytes of shared memory: {error}"
            raise UnshareableError(text) from error
        self._out_fds.append(fd)
        self._num_made += 1
        slot = _Slot(self._num_made, bytes_of(map_segment(fd, capacity, self._rank)))
        self._slots.append(slot)
        self._tell(_Kind.SLOT, slot.number, size_bytes=capacity)
        return slot

    def _tell(
        self, kind: _Kind, slot: int, step: int = 0, tag: int = 0, size_bytes: int = 0
    ) -> None:
        self._out += _NOTICE.pack(kind, slot, step, tag, size_bytes)

    def _flush(self) -> None:
        while self._out and not self.end:
            try:
                num_sent = socket.send_fds(self.sock, [self._out], self._out_fds)
            except BlockingIOError:
                return
            except OSError:
                self._lose("has left the link")
                return
            del self._out[:num_sent]
            for fd in self._out_fds:
                os.close(fd)
            self._out_fds.clear()

    # ---- Receiving ----

    def _pull(self) -> None:
        """Receive everything that the peer has announced."""
        while not self.end:
            try:
                data, fds, _, _ = socket.recv_fds(
                    self.sock, _READ_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            self._in_fds += fds
            self._in += data
            try:
                self._read()
            except StratagemError as error:
                shut_down(self.sock)
                self._lose(f"said what is refused: {error}")
            if not data:
                self._lose("has left the link")

    def _read(self) -> None:
        end = len(self._in) - len(self._in) % _NOTICE.size
        for notice in _NOTICE.iter_unpack(self._in[:end]):
            self._heed(*notice)
        del self._in[:end]

    def _heed(self, kind: int, number: int, step: int, tag: int, size_bytes: int) -> None:
        match kind:
            case _Kind.MESSAGE:
                room = self._rooms.get(number)
                if room is None or size_bytes > len(room):
                    raise IntegrityError(f"a message of {size_bytes} bytes in slot {number}")
                self._box.put(Route(self._peer, step, tag), room[:size_bytes])
                self._tell(_Kind.FREE, number)  # it is sent with the next message, or before a wait
            case _Kind.FREE:
                for slot in self._slots:
                    slot.is_free = slot.is_free or slot.number == number
            case _Kind.SLOT:
                if not self._in_fds:
                    raise IntegrityError(f"slot {number} without memory")
                fd = self._in_fds.popleft()
                try:
                    self._rooms[number] = bytes_of(map_segment(fd, size_bytes, self._peer))
                finally:
                    os.close(fd)
            case _Kind.DROP:
                self._rooms.pop(number, None)
            case _:
                raise IntegrityError(f"a notice of kind {kind}")

    def _lose(self, what: str) -> None:
        if not self.end:
            self.end = f"member {self._peer} {what}"
            self._box.leave(self._peer, self.end)


def _capacity_for(size_bytes: int) -> int:
    """Round a size up by an eighth to a quarter, so that a slot fits similar messages."""
    unit = max(_PAGE_BYTES, (1 << size_bytes.bit_length()) >> 3)
    return -(-max(size_bytes, 1) // unit) * unit
