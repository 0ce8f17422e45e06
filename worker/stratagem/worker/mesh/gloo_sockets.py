"""Finds the sockets that a process group opened, and cuts them.

gloo has no abort: the only way to end its waits is to shut its connections down. Its sockets are
those that appeared while the group was formed and that use a port of a member's gloo listener, so
that connections which other threads open at the same moment are left alone. So are listening
sockets: gloo answers a cut there with std::terminate.
"""

import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from stratagem.worker.mesh import same_host


@dataclass(frozen=True, slots=True)
class SocketId:
    """A socket of this process. The inode distinguishes it from a later one of the same number."""

    fd: int
    inode: int


def open_sockets() -> frozenset[SocketId]:
    """Returns every internet socket of this process."""
    return frozenset(socket_id for socket_id, _ in _sockets())


def listening_ports(before: frozenset[SocketId]) -> tuple[int, ...]:
    """Returns the ports of the listeners that appeared since `before`."""
    return tuple(
        sock.getsockname()[1]
        for socket_id, sock in _sockets()
        if socket_id not in before and _listens(sock)
    )


def connections(before: frozenset[SocketId], ports: Collection[int]) -> tuple[SocketId, ...]:
    """Returns the connected sockets that appeared since `before` and have one of the ports at an
    end."""
    return tuple(
        socket_id
        for socket_id, sock in _sockets()
        if socket_id not in before and not _listens(sock) and not _ends(sock).isdisjoint(ports)
    )


def shut_down(target: SocketId) -> None:
    """Ends a connection in both directions; its owner still has to close it."""
    sock = _duplicate(target.fd)
    if sock is None:
        return
    with sock:
        if _inode(sock) == target.inode:
            same_host.shut_down(sock)


def _sockets() -> Iterator[tuple[SocketId, socket.socket]]:
    """Yields each internet socket with a duplicate to look at, which is closed at the next step."""
    for name in os.listdir("/proc/self/fd"):
        sock = _duplicate(int(name))
        if sock is None:
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                yield SocketId(int(name), _inode(sock)), sock


def _duplicate(fd: int) -> socket.socket | None:
    """Returns a second handle on the socket behind fd; None when there is none (any more)."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


def _listens(sock: socket.socket) -> bool:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0


def _ends(sock: socket.socket) -> frozenset[int]:
    """Returns the ports at both ends; empty when it is not connected."""
    try:
        return frozenset({sock.getsockname()[1], sock.getpeername()[1]})
    except OSError:
        return frozenset()
