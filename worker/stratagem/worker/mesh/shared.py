"""The shared-memory engine: members on one host that can hand each other memory.

Each member allocates an anonymous segment (memfd) and passes it to the others over connected Unix
sockets; all map all of them. A segment has no name, so there is nothing to clean up, whenever and
however a process ends, and no mount whose size limits it. The sockets also carry the barriers, as
counted bytes: a peer that dies is seen at once. Members find each other in the abstract namespace,
that is, inside one network namespace; a secret from the rendezvous tells them from strangers.
Knows nothing of gradients.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.mesh.segments import (
    UnshareableError,
    allocate,
    map_segment,
    send_segment,
    take_segment,
)

_SECRET_BYTES: Final = 16
_HELLO: Final = struct.Struct(f">{_SECRET_BYTES}sI")  # the listener's secret, the caller's rank
HELLO_TIMEOUT_S: Final = 1.0


class SharedListener:
    """Where the other members of this host reach this one. Made before the rendezvous."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._name = f"stratagem-{secrets.token_hex(8)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(f"\0{self._name}")
        self.socket.listen(128)

    @property
    def address(self) -> bytes:
        return f"{self._name}:{self.secret.hex()}".encode()

    def close(self) -> None:
        self.socket.close()


def host_identity() -> str | None:
    """Equal for processes that can reach each other's listeners; None where there is no way.

    The boot id alone is not enough: containers have it in common and share nothing else.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
    return f"{boot_id}/{network}"


def form_shared(
    listener: SharedListener, rank: int, size: int, addresses: Sequence[bytes], timeout_s: float
) -> SharedGroup:
    """Connects all members; addresses by rank, as their listeners gave them.

    Raises UnshareableError when a member cannot be reached at all, which is also what a member
    looks like that has just died; ExchangeError when one does not come.
    """
    deadline_s = time.monotonic() + timeout_s
    found: dict[int, socket.socket] = {}
    try:
        for peer in range(rank):
            found[peer] = _call(addresses[peer], rank, peer, deadline_s)
        while len(found) < size - 1:
            peer, sock = _accept(listener, found, rank, size, deadline_s)
            sock.sendall(_secret_of(addresses[peer]))
            found[peer] = sock
        for peer in range(rank):
            answer = _receive(found[peer], _SECRET_BYTES, peer, deadline_s)
            if answer != listener.secret:
                raise UnshareableError(f"member {peer} is not who answers at its address")
    except BaseException:
        for sock in found.values():
            sock.close()
        raise
    finally:
        listener.close()
    return SharedGroup(rank, size, found)


class SharedGroup:
    """A connected socket to each other member. Used by one thread; only `cut` by others."""

    name = "shm"

    def __init__(self, rank: int, size: int, sockets: Mapping[int, socket.socket]) -> None:
        self.rank, self.size = rank, size
        self._sockets = dict(sockets)
        self._peer_of = {sock.fileno(): peer for peer, sock in self._sockets.items()}
        self._heard = dict.fromkeys(self._sockets, 0)
        self._owed = dict.fromkeys(self._sockets, 0)
        """Tokens that did not fit into the socket yet."""
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        self.is_cut = False  # guarded by _lock, as is the closing of sockets
        for sock in self._sockets.values():
            sock.setblocking(False)

    def share(self, sizes_bytes: Sequence[int], timeout_s: float) -> list[Tensor]:
        """Every member's segment as bytes, by rank; all members call it once, before any token.

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
            for each in fds:
                os.close(each)
        return [segments[rank] for rank in range(self.size)]

    def tell(self) -> None:
        """Sends one token to each other member. Never blocks and never fails: an ended peer is
        noticed by `hear`."""
        for peer in self._owed:
            self._owed[peer] += 1
        self._flush()

    def has_heard(self, count: int) -> bool:
        """Whether each other member has sent that many tokens since the group was formed."""
        if any(heard < count for heard in self._heard.values()):
            self._drain()
        return all(heard >= count for heard in self._heard.values())

    def hear(self, count: int, last: int, timeout_s: float) -> None:
        """Blocks until `has_heard(count)`. Raises ExchangeError, which names a member that is
        missing: silent, or gone before it has sent `last` tokens. Who left after them left
        nothing undone; who left before is missed by all, so nobody waits for the others."""
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
                _shut_down(sock)

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


# ---- connecting ----


def _secret_of(address: bytes) -> bytes:
    return bytes.fromhex(address.decode().partition(":")[2])


def _call(address: bytes, rank: int, peer: int, deadline_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(max(0.001, deadline_s - time.monotonic()))
    try:
        sock.connect("\0" + address.decode().partition(":")[0])
        sock.sendall(_HELLO.pack(_secret_of(address), rank))
    except OSError as error:
        sock.close()
        raise UnshareableError(f"cannot reach member {peer} on this host: {error}") from error
    return sock


def _accept(
    listener: SharedListener,
    found: Mapping[int, socket.socket],
    rank: int,
    size: int,
    deadline_s: float,
) -> tuple[int, socket.socket]:
    """The next member that calls; strangers are turned away."""
    missing = next(p for p in range(rank + 1, size) if p not in found)
    while True:
        _await_input(listener.socket, found, missing, deadline_s)
        sock, _ = listener.socket.accept()
        sock.settimeout(HELLO_TIMEOUT_S)
        try:
            secret, peer = _HELLO.unpack(sock.recv(_HELLO.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            sock.close()
            continue
        if secrets.compare_digest(secret, listener.secret) and rank < peer < size:
            return peer, sock
        sock.close()


def _await_input(
    listening: socket.socket,
    found: Mapping[int, socket.socket],
    missing: int,
    deadline_s: float,
) -> None:
    """Until somebody calls; a connected member that goes meanwhile ends the waiting."""
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    peers = {sock.fileno(): peer for peer, sock in found.items()}
    for fd in peers:
        poll.register(fd, select.POLLRDHUP)
    ready = dict(poll.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))))
    if not ready:
        raise ExchangeError(f"member {missing} does not connect")
    gone = sorted(peers[fd] for fd in ready if fd in peers)
    if gone:
        raise ExchangeError(f"member {gone[0]} has left while the group was formed")


def _receive(sock: socket.socket, num_bytes: int, peer: int, deadline_s: float) -> bytes:
    sock.settimeout(max(0.001, deadline_s - time.monotonic()))
    try:
        answer = sock.recv(num_bytes, socket.MSG_WAITALL)
    except OSError as error:
        raise ExchangeError(f"member {peer} does not answer: {error}") from error
    if len(answer) < num_bytes:
        raise ExchangeError(f"member {peer} has left while the group was formed")
    return answer


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # the peer was faster
        return
