"""The shared-memory engine, by which members on one host share memory.

Each member allocates an anonymous segment (memfd) and passes it to the others over connected Unix
sockets; all members map all segments. A segment has no name, so there is nothing to clean up,
whenever and however a process ends, and no mount limits its size. The sockets also carry the
barriers, as counted bytes, so a dead peer is noticed at once.
"""

import fcntl
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from stratagem.worker.mesh.link import ExchangeError

# ---- Anonymous memory segments ----

_SEALS: Final = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
_SEGMENT: Final = b"S"
_NO_SEGMENT: Final = b"N"


class UnshareableError(ExchangeError):
    """Raised if members of one host cannot share memory; a retry does not help."""


def allocate(size_bytes: int) -> int:
    """Allocate a segment completely: a lack of memory later would kill the process."""
    fd = os.memfd_create("stratagem", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, max(1, size_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_segment(fd: int, size_bytes: int, owner: int) -> Tensor:
    """Map a segment as bytes. Its seals prevent its owner from truncating it."""
    size_found = os.fstat(fd).st_size
    if size_found != max(1, size_bytes):
        raise ExchangeError(
            f"the segment of member {owner} has {size_found} bytes, expected {size_bytes}"
        )
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ExchangeError(f"the segment of member {owner} is not sealed")
    mapped = mmap.mmap(fd, size_found, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(mapped, dtype=torch.uint8)


def send_segment(sock: socket.socket, fds: list[int]) -> None:
    try:
        socket.send_fds(sock, [_SEGMENT if fds else _NO_SEGMENT], fds)
    except OSError:  # the peer is gone, which the next receive will report
        return


def take_segment(sock: socket.socket, size_bytes: int, peer: int, deadline_s: float) -> Tensor:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not poll.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))):
        raise ExchangeError(f"no segment from member {peer}")
    try:
        word, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise ExchangeError(f"no segment from member {peer}: {error}") from error
    try:
        if word == _NO_SEGMENT:
            raise UnshareableError(f"member {peer} cannot allocate shared memory")
        if not fds:
            raise ExchangeError(f"member {peer} has left before it shared its segment")
        return map_segment(fds[0], size_bytes, peer)
    finally:
        for fd in fds:
            os.close(fd)


# ---- Members on one host ----
#
# Members recognise that they share a host and connect by Unix sockets. They connect in the abstract
# namespace, that is, inside one network namespace; a secret from the rendezvous excludes others.

_SECRET_BYTES: Final = 16
_HELLO: Final = struct.Struct(f">{_SECRET_BYTES}sI")  # the listener's secret, the caller's rank
_MAX_CALLERS: Final = 128


class SharedListener:
    """The socket at which other members on this host connect to this one."""

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
    """Return a name that is equal for processes that can reach each other's listeners; None if
    there is none.

    The boot id alone is not enough: separate containers have it in common.
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


def connect(
    listener: SharedListener, rank: int, size: int, addresses: Sequence[bytes], timeout_s: float
) -> dict[int, socket.socket]:
    """Return a socket to each other member, by rank. addresses: the listeners' addresses, by rank.

    Closes the listener. Raises UnshareableError when a member cannot be reached at all, as when it
    has just died. Raises ExchangeError when one does not connect.
    """
    deadline_s = time.monotonic() + timeout_s
    sockets: dict[int, socket.socket] = {}
    door = _Door(listener)
    try:
        for peer in range(rank):
            sockets[peer] = _call(addresses[peer], rank, peer, deadline_s)
        while len(sockets) < size - 1:
            missing = next(p for p in range(rank + 1, size) if p not in sockets)
            _await_input(door.sockets, sockets, missing, deadline_s)
            for peer, sock in door.admit():
                if peer in sockets or not rank < peer < size:
                    sock.close()
                    continue
                sockets[peer] = sock
                _send(sock, _secret_of(addresses[peer]), peer, deadline_s)
        for peer in range(rank):
            answer = _receive(sockets[peer], _SECRET_BYTES, peer, deadline_s)
            if answer != listener.secret:
                raise UnshareableError(f"member {peer} is not who answers at its address")
    except BaseException:
        for sock in sockets.values():
            sock.close()
        raise
    finally:
        door.close()
    return sockets


def shut_down(sock: socket.socket) -> None:
    """Shut a connection down in both directions; its owner must still close it."""
    with suppress(OSError):  # the peer was faster
        sock.shutdown(socket.SHUT_RDWR)


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


class _Door:
    """A listener with the callers that have not sent the secret yet, so that a slow caller does not
    block others.

    Callers with a wrong secret are refused.
    """

    def __init__(self, listener: SharedListener) -> None:
        self._listener = listener
        self._listener.socket.setblocking(False)
        self._callers: list[socket.socket] = []

    @property
    def sockets(self) -> list[socket.socket]:
        """Return the sockets to poll before calling `admit`."""
        return [self._listener.socket, *self._callers]

    def admit(self) -> list[tuple[int, socket.socket]]:
        """Return the callers that have sent the secret, with their ranks, without waiting."""
        with suppress(BlockingIOError):
            caller, _ = self._listener.socket.accept()
            caller.setblocking(False)
            self._callers.append(caller)
        if len(self._callers) > _MAX_CALLERS:
            self._callers.pop(0).close()
        admitted = []
        for caller in list(self._callers):
            try:
                hello = caller.recv(_HELLO.size)
            except BlockingIOError:
                continue
            except OSError:
                hello = b""
            self._callers.remove(caller)
            secret, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0)
            if secrets.compare_digest(secret, self._listener.secret):
                admitted.append((rank, caller))
            else:
                caller.close()
        return admitted

    def close(self) -> None:
        self._listener.close()
        for caller in self._callers:
            caller.close()


def _await_input(
    callers: Sequence[socket.socket],
    sockets: Mapping[int, socket.socket],
    missing: int,
    deadline_s: float,
) -> None:
    """Wait until a caller has input. Raises ExchangeError at the deadline, or if a connected member
    leaves."""
    poll = select.poll()
    for sock in callers:
        poll.register(sock, select.POLLIN)
    peers = {sock.fileno(): peer for peer, sock in sockets.items()}
    for fd in peers:
        poll.register(fd, select.POLLRDHUP)
    ready = dict(poll.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))))
    if not ready:
        raise ExchangeError(f"member {missing} does not connect")
    gone = sorted(peers[fd] for fd in ready if fd in peers)
    if gone:
        raise ExchangeError(f"member {gone[0]} has left while the group was formed")


def _send(sock: socket.socket, words: bytes, peer: int, deadline_s: float) -> None:
    sock.settimeout(max(0.001, deadline_s - time.monotonic()))
    try:
        sock.sendall(words)
    except OSError as error:
        raise ExchangeError(f"member {peer} has left while the group was formed") from error


def _receive(sock: socket.socket, num_bytes: int, peer: int, deadline_s: float) -> bytes:
    sock.settimeout(max(0.001, deadline_s - time.monotonic()))
    try:
        answer = sock.recv(num_bytes, socket.MSG_WAITALL)
    except OSError as error:
        raise ExchangeError(f"member {peer} does not answer: {error}") from error
    if len(answer) < num_bytes:
        raise ExchangeError(f"member {peer} has left while the group was formed")
    return answer


# ---- Shared group ----


def form_shared(
    listener: SharedListener, rank: int, size: int, addresses: Sequence[bytes], timeout_s: float
) -> "SharedGroup":
    """Connect all members as a group that shares memory; raises the errors of `connect`."""
    return SharedGroup(rank, size, connect(listener, rank, size, addresses, timeout_s))


class SharedGroup:
    """A group of members on one host, connected by sockets. Used by one thread, except `cut`."""

    name = "shm"

    def __init__(self, rank: int, size: int, sockets: Mapping[int, socket.socket]) -> None:
        self.rank, self.size = rank, size
        self._sockets = dict(sockets)
        self._heard = dict.fromkeys(self._sockets, 0)
        self._owed = dict.fromkeys(self._sockets, 0)
        """The number of tokens that did not fit into each socket yet."""
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        self.is_cut = False  # guarded by _lock, as is the closing of sockets
        for sock in self._sockets.values():
            sock.setblocking(False)

    def share(self, sizes_bytes: Sequence[int], timeout_s: float) -> list[Tensor]:
        """Allocate and exchange memory; return every member's segment as bytes, by rank.

        A collective call, once and before any token. sizes_bytes: by rank, equal on all members. A
        segment lives as long as a tensor over it. Raises UnshareableError if a member could not
        allocate.
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
        """Send a token (one byte) to each peer, without blocking; `hear` notices lost peers."""
        for peer in self._owed:
            self._owed[peer] += 1
        self._flush()

    def has_heard(self, count: int) -> bool:
        """Return whether each other member has sent `count` tokens since the group was formed."""
        if any(heard < count for heard in self._heard.values()):
            self._drain()
        return all(heard >= count for heard in self._heard.values())

    def hear(self, count: int, last: int, timeout_s: float) -> None:
        """Block until every other member has sent `count` tokens.

        Raises ExchangeError, naming a member that is silent, or gone before it has sent `last`
        tokens. A member that left after them has completed its work; one that left before is missed
        by all, so none waits for the others.
        """
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
        """Make every wait fail soon, here and at the peers. May be called from any thread."""
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
