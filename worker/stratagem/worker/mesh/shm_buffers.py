"""The shared-memory engine: members on one host that can hand each other memory.

Each member allocates an anonymous segment (memfd) and passes it to the others over connected Unix
sockets; all map all of them. A segment has no name, so there is nothing to clean up, whenever and
however a process ends, and no mount whose size limits it. The sockets also carry the barriers, as
counted bytes: a peer that dies is seen at once. Knows nothing of gradients.
"""

import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.mesh.same_host import SharedListener, connect, shut_down
from stratagem.worker.mesh.shm_segments import (
    UnshareableError,
    allocate,
    map_segment,
    send_segment,
    take_segment,
)


def form_shared(
    listener: SharedListener, rank: int, size: int, addresses: Sequence[bytes], timeout_s: float
) -> "SharedGroup":
    """Connects all members, as `same_host.connect` does."""
    return SharedGroup(rank, size, connect(listener, rank, size, addresses, timeout_s))


class SharedGroup:
    """A connected socket to each other member. Used by one thread; only `cut` by others."""

    name = "shm"

    def __init__(self, rank: int, size: int, sockets: Mapping[int, socket.socket]) -> None:
        self.rank, self.size = rank, size
        self._sockets = dict(sockets)
        self._heard = dict.fromkeys(self._sockets, 0)
        self._owed = dict.fromkeys(self._sockets, 0)
        """Tokens that did not fit into the socket yet."""
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        self.is_cut = False  # guarded by _lock, as is the closing of sockets
        for sock in self._sockets.values():
            sock.setblocking(False)

    def share(self, sizes_bytes: Sequence[int], timeout_s: float) -> list[Tensor]:
        """Returns every member's segment as bytes, by rank; all members call it once, before any
        token.

        sizes_bytes by rank, the same on all members. A segment lives until the last tensor over
        it is gone. Raises UnshareableError when a member could not allocate its own.
        """
        deadline_s = time.monotonic() + timeout_s
        refusal = ""
        fd: int | None = None
        try:
            fd = allocate(sizes_bytes[self.rank])
        except OSError as error:
            refusal = f"cannot allocate {sizes_bytes[self.rank]} bytes of shared memory: {error}"
        fds = [] if fd is None else [fd]
        try:
            for sock in self._sockets.values():
                send_segment(sock, fds)
            if fd is None:
                raise UnshareableError(refusal)
            segments = {self.rank: map_segment(fd, sizes_bytes[self.rank], self.rank)}
            for peer, sock in self._sockets.items():
                segments[peer] = take_segment(sock, sizes_bytes[peer], peer, deadline_s)
        finally:
            for descriptor in fds:
                os.close(descriptor)
        return [segments[rank] for rank in range(self.size)]

    def send_token(self) -> None:
        """Sends one token to each other member. Never blocks and never fails: an ended peer is
        noticed by `hear`."""
        for peer in self._owed:
            self._owed[peer] += 1
        self._flush()

    def has_heard(self, count: int) -> bool:
        """Returns whether each other member has sent that many tokens since the group was
        formed."""
        if any(heard < count for heard in self._heard.values()):
            self._drain()
        return all(heard >= count for heard in self._heard.values())

    def hear(self, count: int, last: int, timeout_s: float) -> None:
        """Blocks until `has_heard(count)`. Raises ExchangeError, which names a member that is
        missing: silent, or gone before it has sent `last` tokens. A member that left after them
        left nothing undone; one that left before is missed by all, so none waits for the others."""
        deadline_s = time.monotonic() + timeout_s
        while not self.has_heard(count):
            late = sorted(peer for peer, heard in self._heard.items() if heard < count)
            if self.is_cut:
                raise ExchangeError("the exchange was cut")
            gone = sorted(peer for peer in self._ended if self._heard[peer] < last)
            if gone:
                raise ExchangeError(f"member {gone[0]} has left the exchange")
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise ExchangeError(f"nothing from member {late[0]} within {timeout_s:g} s")
            self._wait(left_s)

    def cut(self) -> None:
        """Makes every wait fail soon, here and at the peers. From any thread, at any time."""
        with self._lock:
            self.is_cut = True
            for sock in self._sockets.values():
                shut_down(sock)

    def close(self) -> None:
        with self._lock:
            self.is_cut = True
            for sock in self._sockets.values():
                sock.close()
            self._sockets = {}

    def _wait(self, left_s: float) -> None:
        poll = select.poll()
        for peer, sock in self._sockets.items():
            if peer not in self._ended:
                poll.register(sock, select.POLLIN | (select.POLLOUT if self._owed[peer] else 0))
        poll.poll(max(1.0, 1000 * left_s))
        self._flush()

    def _flush(self) -> None:
        for peer, sock in self._sockets.items():
            if self._owed[peer]:
                try:
                    self._owed[peer] -= sock.send(bytes(self._owed[peer]))
                except BlockingIOError:
                    continue
                except OSError:
                    self._owed[peer] = 0

    def _drain(self) -> None:
        for peer, sock in self._sockets.items():
            if peer in self._ended:
                continue
            try:
                tokens = sock.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                tokens = b""
            self._heard[peer] += len(tokens)
            if not tokens:
                self._ended.add(peer)
