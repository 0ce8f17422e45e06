"""The gloo engine: TCP between members on CPU.

A raw process group on a store of our own, so that there is no default group and no store server:
the members' addresses travel through the caller's rendezvous, which is also the barrier. Forming
a group costs milliseconds, so each membership gets a fresh one. Knows nothing of gradients.
"""

import os
import select
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from stratagem.common.tensors.traffic import RECEIVED, SENT, Flow, over
from stratagem.worker.mesh import gloo_sockets
from stratagem.worker.mesh.link import LEAVE_BYTES_PER_S, LEAVE_GRACE_S, ExchangeError, Rendezvous

# One group begins to listen at a time: the listeners that appear meanwhile are its own.
_forming = threading.Lock()
_SENT, _RECEIVED = over("gloo", SENT), over("gloo", RECEIVED)


def form_gloo(
    rank: int, size: int, host: str, rendezvous: Rendezvous, timeout_s: float
) -> "GlooLink":
    """Joins the group of `size` members; blocks until all are connected.

    host is the address of this machine under which the others reach it. rendezvous gets this
    member's address and answers with those of all, by rank; what it raises is raised here.
    """
    with _forming:
        before = gloo_sockets.open_sockets()
        try:
            device = dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
        except RuntimeError as error:
            raise ExchangeError(f"cannot listen on {host}: {error}") from error
        store = _RendezvousStore(rank, size, gloo_sockets.listening_ports(before), rendezvous)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2  # serve collectives only
    try:
        group = dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise ExchangeError(f"cannot form a group of {size}: {error}") from error
    own = gloo_sockets.connections(before, store.ports)
    return GlooLink(rank, size, group, own)


class GlooLink:
    """A `Link` over one process group.

    gloo fails the transfers with a peer that is gone, but not those with the others, which may wait
    for that peer themselves. So a thread of the link watches the connections and cuts all of them
    when one has ended and the transfers under way do not come to their end either.
    """

    name = "gloo"
    in_order = False

    def __init__(
        self,
        rank: int,
        size: int,
        group: dist.ProcessGroupGloo,
        connections: tuple[gloo_sockets.SocketId, ...],
    ) -> None:
        self.rank, self.size = rank, size
        self._group: dist.ProcessGroupGloo | None = group
        self._connections = connections
        self._changed = threading.Condition()
        self._num_open_bytes = 0  # guarded by _changed: transfers not yet waited for
        self._wake = os.eventfd(0)
        self._watcher = threading.Thread(target=self._watch, name="gloo-watch", daemon=True)
        self._watcher.start()

    def send(self, peer: int, tag: int, tensor: Tensor) -> "GlooWork":
        what = f"send to member {peer}"
        return self._begin(what, tensor, _SENT, lambda group: group.send([tensor], peer, tag))

    def recv(self, peer: int, tag: int, tensor: Tensor) -> "GlooWork":
        what = f"receive from member {peer}"
        return self._begin(what, tensor, _RECEIVED, lambda group: group.recv([tensor], peer, tag))

    def all_reduce(self, tensor: Tensor) -> "GlooWork":
        what = "all-reduce among all members"
        return self._begin(what, tensor, _SENT, lambda group: group.allreduce([tensor]))

    def cut(self) -> None:
        with self._changed:  # not after close: the numbers may be in use again
            for connection in self._connections:
                gloo_sockets.shut_down(connection)

    def close(self) -> None:
        with self._changed:
            self._connections = ()
            self._changed.notify_all()
        if self._group is not None:
            os.eventfd_write(self._wake, 1)
            self._watcher.join()
            os.close(self._wake)
        self._group = None

    def done(self, size_bytes: int) -> None:
        """Counts a transfer that was waited for."""
        with self._changed:
            self._num_open_bytes -= size_bytes
            if self._num_open_bytes == 0:
                self._changed.notify_all()

    def _begin(
        self, what: str, tensor: Tensor, flow: Flow, start: Callable[[Any], dist.Work]
    ) -> "GlooWork":
        try:
            work = start(self._open())
        except RuntimeError as error:
            raise ExchangeError(f"{what}: {_first_line(error)}") from None
        flow.num_bytes += tensor.nbytes
        with self._changed:
            self._num_open_bytes += tensor.nbytes
        return GlooWork(self, work, what, tensor.nbytes)

    def _open(self) -> dist.ProcessGroupGloo:
        if self._group is None:
            raise ExchangeError("the link is closed")
        return self._group

    def _watch(self) -> None:
        poll = select.poll()
        for connection in self._connections:
            poll.register(connection.fd, select.POLLRDHUP)
        # A connection that has ended already may have left its number to the wake-up itself.
        if not any(connection.fd == self._wake for connection in self._connections):
            poll.register(self._wake, select.POLLIN)
            poll.poll()
        # A peer that has all it needs may leave while we still receive from the others.
        with self._changed:
            grace_s = LEAVE_GRACE_S + self._num_open_bytes / LEAVE_BYTES_PER_S
            ends = self._changed.wait_for(
                lambda: self._num_open_bytes == 0 or not self._connections, grace_s
            )
        if not ends:
            self.cut()


class GlooWork:
    """One transfer. `what` says which, for the error."""

    __slots__ = ("_link", "_size_bytes", "_what", "_work")

    def __init__(self, link: GlooLink, work: dist.Work, what: str, size_bytes: int) -> None:
        self._link, self._work, self._what, self._size_bytes = link, work, what, size_bytes

    def wait(self, timeout_s: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ExchangeError(f"{self._what}: {_first_line(error)}") from None
        self._link.done(self._size_bytes)


class _RendezvousStore(Store):
    """A store that answers gloo's questions about its peers from one rendezvous.

    gloo sets its own address once and then waits for and gets each member's, under keys that end
    in "/<rank>". Each address is preceded by the ports of the member's listener.
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
        """Returns at once: all addresses are here as soon as set has returned."""


def _unpack(answer: bytes) -> tuple[tuple[int, ...], bytes]:
    num_ports = answer[0]
    end = 1 + 2 * num_ports
    return struct.unpack(f">{num_ports}H", answer[1:end]), answer[end:]


def _first_line(error: Exception) -> str:
    """Returns the first line, which says what happened: gloo appends advice and a C++ stack."""
    return str(error).splitlines()[0]
