"""Members on one host: how they recognise that they share it, and connected Unix sockets among
them.

They meet in the abstract namespace, that is, inside one network namespace; a secret from the
rendezvous keeps strangers out. Knows nothing of what the sockets will carry.
"""

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.mesh.shm_segments import UnshareableError

_SECRET_BYTES: Final = 16
_HELLO: Final = struct.Struct(f">{_SECRET_BYTES}sI")  # the listener's secret, the caller's rank
_MAX_CALLERS: Final = 128


class SharedListener:
    """The socket by which the other members of this host reach this one. Made before the
    rendezvous."""

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
    """Returns a name that is equal for processes that can reach each other's listeners; None where
    there is no way.

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


def connect(
    listener: SharedListener, rank: int, size: int, addresses: Sequence[bytes], timeout_s: float
) -> dict[int, socket.socket]:
    """Returns a socket to each other member, by rank; addresses by rank, as their listeners gave
    them.

    Closes the listener. Raises UnshareableError when a member cannot be reached at all, which is
    also what a member looks like that has just died; ExchangeError when one does not come.
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
    """Ends the connection in both directions; its owner still has to close it."""
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
    """A listener, and the callers that have not sent a word yet: a member of a busy host may stand
    still there without holding others up. Strangers are turned away."""

    def __init__(self, listener: SharedListener) -> None:
        self._listener = listener
        self._listener.socket.setblocking(False)
        self._callers: list[socket.socket] = []

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets of which any input is a reason to `admit`."""
        return [self._listener.socket, *self._callers]

    def admit(self) -> list[tuple[int, socket.socket]]:
        """Returns the callers that have sent the secret by now, each with the rank it gives. Does
        not wait."""
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
    """Waits until one of the callers has input. Raises ExchangeError when none comes in time or a
    connected member leaves meanwhile."""
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
