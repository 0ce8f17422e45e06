"""The gloo engine: TCP between members on CPU.

A raw process group on a store of our own, so that there is no default group and no store server:
the members' addresses travel through the caller's rendezvous, which is also the barrier. Forming
a group costs milliseconds, so each membership gets a fresh one. Knows nothing of gradients.
"""

import os
import select
import struct
import threading
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from stratagem.worker.mesh import gloo_sockets
from stratagem.worker.mesh.link import LEAVE_BYTES_PER_S, LEAVE_GRACE_S, ExchangeError, Rendezvous
from stratagem.worker.mesh.process_group_link import ProcessGroupLink

# One group begins to listen at a time: the listeners that appear meanwhile are its own.
_forming = threading.Lock()


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


class GlooLink(ProcessGroupLink):
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
        super().__init__(rank, size, group)
        self._connections = connections
        self._changed = threading.Condition()
        self._num_open_bytes = 0  # guarded by _changed: transfers not yet waited for
        self._wake = os.eventfd(0)
        self._watcher = threading.Thread(target=self._watch, name="gloo-watch", daemon=True)
        self._watcher.start()

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

    def count(self, num_bytes: int) -> None:
        with self._changed:
            self._num_open_bytes += num_bytes
            if self._num_open_bytes == 0:
                self._changed.notify_all()

    def failed(self, what: str, error: RuntimeError) -> ExchangeError:
        """Says the first line, which is what happened: gloo appends advice and a C++ stack."""
        return ExchangeError(f"{what}: {str(error).splitlines()[0]}")

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
