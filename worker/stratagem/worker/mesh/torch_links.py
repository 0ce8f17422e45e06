"""The gloo and nccl engines, links over torch's process groups."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from stratagem.common.tensors.stream import RECEIVED, SENT, Flow, over
from stratagem.worker.mesh import shm
from stratagem.worker.mesh.link import LEAVE_BYTES_PER_S, LEAVE_GRACE_S, ExchangeError, Rendezvous

# ---- Links over a process group ----


class ProcessGroupLink:
    """Base class of links over a process group of torch."""

    name = ""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        """Take over the group, an object of the backend's class with methods on lists of
        tensors."""
        self.rank, self.size = rank, size
        self._group: Any = group
        self._sent, self._received = over(self.name, SENT), over(self.name, RECEIVED)

    def send(self, peer: int, tag: int, tensor: Tensor) -> GroupTransfer:
        what = f"send to member {peer}"
        return self._begin(what, tensor, self._sent, lambda group: group.send([tensor], peer, tag))

    def recv(self, peer: int, tag: int, tensor: Tensor) -> GroupTransfer:
        what = f"receive from member {peer}"
        flow = self._received
        return self._begin(what, tensor, flow, lambda group: group.recv([tensor], peer, tag))

    def all_reduce(self, tensor: Tensor) -> GroupTransfer:
        what = "all-reduce among all members"
        return self._begin(what, tensor, self._sent, lambda group: group.allreduce([tensor]))

    def failed(self, what: str, error: RuntimeError) -> ExchangeError:
        """Return the ExchangeError of a transfer for an error of the group."""
        return ExchangeError(f"{what}: {error}")

    def count(self, num_bytes: int) -> None:
        """Add to the number of bytes in transfer; negative once their wait has ended."""

    def _begin(
        self, what: str, tensor: Tensor, flow: Flow, start: Callable[[Any], dist.Work]
    ) -> GroupTransfer:
        if self._group is None:
            raise ExchangeError("the link is closed")
        try:
            work = start(self._group)
        except RuntimeError as error:
            raise self.failed(what, error) from None
        flow.num_bytes += tensor.nbytes
        self.count(tensor.nbytes)
        return GroupTransfer(self, work, what, tensor.nbytes)


class GroupTransfer:
    """A transfer in progress. what: its name in errors."""

    __slots__ = ("_link", "_size_bytes", "_what", "_work")

    def __init__(self, link: ProcessGroupLink, work: dist.Work, what: str, size_bytes: int) -> None:
        self._link, self._work, self._what, self._size_bytes = link, work, what, size_bytes

    def wait(self, timeout_s: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self._link.failed(self._what, error) from None
        self._link.count(-self._size_bytes)


# ---- Sockets of gloo ----
#
# gloo has no abort: the only way to end its waits is to shut its connections down. Its sockets are
# those that appeared while the group was formed and that use a port of a member's gloo listener, so
# that connections which other threads open at the same moment are left alone. So are listening
# sockets: gloo answers a cut there with std::terminate.


@dataclass(frozen=True, slots=True)
class SocketId:
    """Identifies a socket; the inode differs if a later socket reuses the number."""

    fd: int
    inode: int


def open_sockets() -> frozenset[SocketId]:
    """Return every internet socket of this process."""
    return frozenset(socket_id for socket_id, _ in _sockets())


def listening_ports(before: frozenset[SocketId]) -> tuple[int, ...]:
    """Return the ports on which sockets listen that were opened since `before`."""
    return tuple(
        sock.getsockname()[1]
        for socket_id, sock in _sockets()
        if socket_id not in before and _listens(sock)
    )


def connections(before: frozenset[SocketId], ports: Collection[int]) -> tuple[SocketId, ...]:
    """Return the sockets connected since `before` that have one of these ports at either end."""
    return tuple(
        socket_id
        for socket_id, sock in _sockets()
        if socket_id not in before and not _listens(sock) and not _ends(sock).isdisjoint(ports)
    )


def shut_down(target: SocketId) -> None:
    """Shut a connection down in both directions; its owner must still close it."""
    sock = _duplicate(target.fd)
    if sock is None:
        return
    with sock:
        if _inode(sock) == target.inode:
            shm.shut_down(sock)


def _sockets() -> Iterator[tuple[SocketId, socket.socket]]:
    """Yield (id, duplicate) of each internet socket; the duplicate is closed at the next step."""
    for name in os.listdir("/proc/self/fd"):
        sock = _duplicate(int(name))
        if sock is None:
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                yield SocketId(int(name), _inode(sock)), sock


def _duplicate(fd: int) -> socket.socket | None:
    """Return a duplicate of the socket with this descriptor; None if that is no longer a socket."""
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
    """Return the ports at both ends; empty if the socket is not connected."""
    try:
        return frozenset({sock.getsockname()[1], sock.getpeername()[1]})
    except OSError:
        return frozenset()


# ---- The gloo engine ----
#
# gloo uses TCP between members on CPU. The process group is a raw one on our own store, without a
# default group and a store server: the members' addresses travel through the caller's rendezvous,
# which is also the barrier. Forming a group takes milliseconds, so each membership gets a new one.

# Only one group begins to listen at a time, so the listeners that appear meanwhile are its own.
_forming = threading.Lock()


def form_gloo(
    rank: int, size: int, host: str, rendezvous: Rendezvous, timeout_s: float
) -> GlooLink:
    """Connect `size` members by gloo. host: this machine's address for the others.

    rendezvous: sends this member's address and returns all addresses, by rank; its errors are
    passed on.
    """
    with _forming:
        before = open_sockets()
        try:
            device = dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
        except RuntimeError as error:
            raise ExchangeError(f"cannot listen on {host}: {error}") from error
        store = _RendezvousStore(rank, size, listening_ports(before), rendezvous)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2  # they only serve collectives
    try:
        group = dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise ExchangeError(f"cannot form a group of {size}: {error}") from error
    sockets = connections(before, store.ports)
    return GlooLink(rank, size, group, sockets)


class GlooLink(ProcessGroupLink):
    """A `Link` over one process group.

    gloo fails the transfers with a lost peer, but not those with the others, which may themselves
    wait for that peer. So a thread of the link watches the connections and cuts all of them when
    one has ended and the other transfers do not complete.
    """

    name = "gloo"
    in_order = False

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroupGloo,
        connections: tuple[SocketId, ...],
    ) -> None:
        super().__init__(rank, size, group)
        self._connections = connections
        self._changed = threading.Condition()
        self._num_open_bytes = 0  # guarded by _changed: transfers not yet waited for
        self._wake = os.eventfd(0)
        self._watcher = threading.Thread(target=self._watch, name="gloo-watch", daemon=True)
        self._watcher.start()

    def cut(self) -> None:
        with self._changed:  # not after close, when the numbers may be reused
            for connection in self._connections:
                shut_down(connection)

    def close(self) -> None:
        with self._changed:
            self._connections = ()
            self._changed.notify_all()
        if self._group is not None:
            os.eventfd_write(self._wake, 1)
            self._watcher.join()
            os.close(self._wake)
        self._group = None

    def count(self, num_bytes: int) -> None:
        with self._changed:
            self._num_open_bytes += num_bytes
            if self._num_open_bytes == 0:
                self._changed.notify_all()

    def failed(self, what: str, error: RuntimeError) -> ExchangeError:
        """Return an error with the first line of gloo's message, without advice and C++ stack."""
        return ExchangeError(f"{what}: {str(error).splitlines()[0]}")

    def _watch(self) -> None:
        poll = select.poll()
        for connection in self._connections:
            poll.register(connection.fd, select.POLLRDHUP)
        # The wake-up itself may have the number of a connection that has ended already.
        if not any(connection.fd == self._wake for connection in self._connections):
            poll.register(self._wake, select.POLLIN)
            poll.poll()
        # A peer that has finished may leave while this member still receives from the others.
        with self._changed:
            grace_s = LEAVE_GRACE_S + self._num_open_bytes / LEAVE_BYTES_PER_S
            ends = self._changed.wait_for(
                lambda: self._num_open_bytes == 0 or not self._connections, grace_s
            )
        if not ends:
            self.cut()


class _RendezvousStore(Store):
    """A store for gloo that gets the addresses of all peers from one rendezvous.

    gloo sets its own address once and then waits for and gets each member's, under keys that end in
    "/<rank>". Each address is preceded by the ports of the member's listener.
    """

    def __init__(
        self, rank: int, size: int, ports: tuple[int, ...], rendezvous: Rendezvous
    ) -> None:
        super().__init__()
        self._rank, self._size, self._own_ports = rank, size, ports
        self._rendezvous = rendezvous
        self._addresses: list[bytes] = []
        self.ports: frozenset[int] = frozenset()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        head = struct.pack(f">B{len(self._own_ports)}H", len(self._own_ports), *self._own_ports)
        answers = self._rendezvous(head + bytes(value))
        if len(answers) != self._size:
            raise ValueError(f"rendezvous gave {len(answers)} addresses, expected {self._size}")
        opened = [_unpack(answer) for answer in answers]
        self.ports = frozenset(port for ports, _ in opened for port in ports)
        self._addresses = [address for _, address in opened]

    def get(self, key: str) -> bytes:
        return self._addresses[int(key.rsplit("/", 1)[-1])]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return at once, since all addresses are known after `set`."""


def _unpack(answer: bytes) -> tuple[tuple[int, ...], bytes]:
    num_ports = answer[0]
    end = 1 + 2 * num_ports
    return struct.unpack(f">{num_ports}H", answer[1:end]), answer[end:]


# ---- The nccl engine ----
#
# nccl connects CUDA devices, one per member. It has no tags: two members' transfers run in the
# order of issue on a communicator of the pair, so both ends must issue them in mirrored order; the
# reducer does when `in_order` is set.


def serve_nccl(host: str, timeout_s: float) -> TCPStore:
    """Serve the store that nccl uses at the first transfer of a pair. The first member of the group
    does so, from before the rendezvous until the group's end."""
    try:
        return TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ExchangeError(f"cannot listen on {host}: {error}") from error


def connect_nccl(
    served: TCPStore | None, rank: int, size: int, address: str, timeout_s: float
) -> NcclLink:
    """Connect `size` members by nccl; each must have set its CUDA device. address: where the first
    member serves the store."""
    timeout = timedelta(seconds=timeout_s)
    try:
        name, port = address.rsplit(":", 1)
        store = served or TCPStore(name, int(port), is_master=False, timeout=timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return NcclLink(rank, size, dist.ProcessGroupNCCL(store, rank, size, options))
    except RuntimeError as error:
        raise ExchangeError(f"cannot form a group of {size}: {error}") from error


class NcclLink(ProcessGroupLink):
    """A `Link` over one process group, which matches transfers by order, not by tag."""

    name = "nccl"
    in_order = True

    def cut(self) -> None:
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        self._group = None
