"""Mix the parameters of gossip nodes with those of their neighbours.

A node is a logical shard. Its parameters go only to the members that own neighbours of it. The
owner of a node does not change any bits, because every sum is taken in order of node number, in
float64. The exchange works bucket by bucket: while it mixes one, the next ones are transferred.
Used by one thread; only `cut` may be called from another one.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from stratagem.common.process.failpoints import failpoint
from stratagem.worker.exchange.coded_gather import ON_DEVICE
from stratagem.worker.exchange.layout import Bucket, flatten, plan_buckets, unflatten
from stratagem.worker.exchange.public_copies import Distances, PublicCopies
from stratagem.worker.exchange.transfer_thread import ABANDON_S
from stratagem.worker.exchange.transports import Transfer, start_transfers
from stratagem.worker.mesh.link import ExchangeError, Link, PendingTransfer

# ---- Gossip averaging ----

WINDOW: Final = 3
"""The number of buckets in transfer at once."""
SLICE_ELEMENTS: Final = 1 << 15
"""Number of elements mixed at once, so that the float64 sums fit into the cache."""
MAX_TAG: Final = 2**31 - 1

Term = Callable[[int, int], Tensor]
"""A function of (node, index) that returns a flat float64 tensor to be summed."""


@dataclass(frozen=True, slots=True)
class _Routes:
    """The nodes sent to, and received from, each other member, in ascending order."""

    out: Mapping[int, tuple[int, ...]]
    back: Mapping[int, tuple[int, ...]]


@dataclass(slots=True)
class _Transit:
    """One bucket in transfer: the parameters of own and received nodes, and the transfers."""

    flats: dict[int, Tensor]
    receives: list[PendingTransfer]
    sends: list[PendingTransfer]


P = ParamSpec("P")
R = TypeVar("R")


def _raising_anew(exchange: Callable[P, R]) -> Callable[P, R]:
    """Decorate an exchange so that it raises a new ExchangeError: the traceback of the original one
    would keep the transfers and the group alive."""

    @wraps(exchange)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return exchange(*args, **kwargs)
        except ExchangeError as error:
            reason = str(error)
        raise ExchangeError(reason)

    return call


class GossipExchange:
    """A gossip exchange among the members of one membership. A failed exchange leaves parameters
    half mixed: after ExchangeError the caller must drop them."""

    shares_memory: Final = False

    def __init__(
        self,
        link: Link | None,
        rank: int,
        nodes: Sequence[range],
        weights: Sequence[Mapping[int, float]],
        *,
        deadline_s: float,
        public: PublicCopies | None = None,
    ) -> None:
        """Plan the exchange and take over the link (None for a lone member). nodes: each member's
        nodes by rank, contiguous. weights: each node's mixing weights, by ascending node. public:
        the copies to which coded moves are added; None without a codec."""
        self._link, self._rank, self._size = link, rank, len(nodes)
        self._waiter = None if link is None else Waiter(link, deadline_s=deadline_s)
        self._nodes, self._weights, self._public = nodes[rank], weights, public
        self._routes = _routes(rank, nodes, weights)
        self._pool: dict[tuple[int, int], Tensor] = {}
        self._scratch: dict[int, Tensor] = {}
        self._next_tag = 0
        self._is_cut = False

    @property
    def name(self) -> str:
        link = "solo" if self._link is None else self._link.name
        return link if self._public is None else f"{link}, {self._public.name}"

    @property
    def num_nodes(self) -> int:
        return len(self._weights)

    @_raising_anew
    def mix(self, step: int, tensors: Mapping[int, Sequence[Tensor]]) -> dict[int, Distances]:
        """Mix once: x_i <- Σ_j w_ij x_j, in place, for this member's nodes, through public copies
        if the job has a codec.

        Products and sums are float64, in order of j, rounded once. All members call it equally
        often, with tensors of the same shapes. Return the `Distances` of each of these nodes.
        Raises ExchangeError when a neighbour is lost or silent, or after cut.
        """
        if self._public is not None:
            return self._mix_coded(step, tensors, self._public)
        buckets = plan_buckets(tensors[self._nodes[0]])
        first_tag = self._tags(len(buckets) * self.num_nodes)
        distances = {node: Distances() for node in self._nodes}
        under_way: list[_Transit] = []
        for index, bucket in enumerate(buckets):
            while len(under_way) < min(index + WINDOW, len(buckets)):
                under_way.append(self._start(len(under_way), buckets, tensors, first_tag))
            failpoint("worker.gossip.mixing")
            transit = under_way[index]
            self._wait(transit.receives)
            for node in self._nodes:
                mixed = self._mixed(node, bucket, transit.flats, distances[node])
                unflatten(bucket, mixed, tensors[node])
            self._wait(transit.sends)
        return distances

    def _mix_coded(
        self, step: int, tensors: Mapping[int, Sequence[Tensor]], public: PublicCopies
    ) -> dict[int, Distances]:
        first_tag = self._tags(self.num_nodes)
        device = torch.device("cpu")
        if self._link is not None and self._link.name in ON_DEVICE:
            device = next(iter(tensors.values()))[0].device
        payloads = {
            node: public.encode(node, step, tensors[node]).to(device) for node in self._nodes
        }
        for nodes in self._routes.back.values():
            for node in nodes:
                payloads[node] = torch.empty(public.payload_bytes, dtype=torch.uint8, device=device)
        receives, sends = self._exchange(payloads, first_tag)
        self._wait(receives)
        public.count(len(sends))
        for node, payload in payloads.items():
            public.advance(node, step, payload)
        distances = {
            node: public.mix(node, self._weights[node], tensors[node]) for node in self._nodes
        }
        self._wait(sends)
        return distances

    @_raising_anew
    def sum_in_order(self, sizes: Sequence[int], term: Term) -> list[Tensor]:
        """Return for each index the sum of term(node, index) over all nodes, in order of node, in
        float64.

        sizes: elements by index. A running sum goes from member to member and the result comes back
        the same way, so no member sends more than twice its size. Every member gets the same bits,
        whichever member owns a node. Raises ExchangeError.
        """
        first_tag = self._tags(2 * len(sizes))
        before, after = self._rank - 1, self._rank + 1
        device = term(self._nodes[0], 0).device if sizes else torch.device("cpu")
        totals = [torch.empty(size, dtype=torch.float64, device=device) for size in sizes]
        coming = (
            [self._receive(before, first_tag + i, total) for i, total in enumerate(totals)]
            if before >= 0
            else []
        )
        going: list[PendingTransfer] = []
        for index, total in enumerate(totals):
            if before >= 0:
                self._wait([coming[index]])
            for node in self._nodes:
                value = term(node, index)
                total.copy_(value) if node == 0 else total.add_(value)
            if after < self._size:
                going.append(self._send(after, first_tag + index, total))
        self._wait(going)
        self._pass_back(totals, first_tag + len(sizes))
        return totals

    def cut(self) -> None:
        """End the exchange, from any thread: waits raise here, and soon at the peers."""
        self._is_cut = True
        if self._waiter is not None:
            self._waiter.fail("the exchange was cut")

    def close(self) -> None:
        """Free the link."""
        self._pool.clear()
        self._scratch.clear()
        if self._waiter is not None and self._link is not None:
            self._waiter.close()
            self._link.close()

    def _pass_back(self, totals: Sequence[Tensor], first_tag: int) -> None:
        before, after = self._rank - 1, self._rank + 1
        works: list[PendingTransfer] = []
        for index, total in enumerate(totals):
            if after < self._size:
                self._wait([self._receive(after, first_tag + index, total)])
            if before >= 0:
                works.append(self._send(before, first_tag + index, total))
        self._wait(works)

    def _start(
        self,
        index: int,
        buckets: Sequence[Bucket],
        tensors: Mapping[int, Sequence[Tensor]],
        first_tag: int,
    ) -> _Transit:
        """Start to send a bucket of this member's nodes, and to receive it from the neighbours."""
        bucket, tag = buckets[index], first_tag + index * self.num_nodes
        like = tensors[self._nodes[0]][bucket.indices[0]]
        flats = {
            node: self._flat(node, index, bucket, like.device)
            for node in {*self._nodes, *(n for nodes in self._routes.back.values() for n in nodes)}
        }
        for node in self._nodes:
            flatten(bucket, tensors[node], flats[node])
        return _Transit(flats, *self._exchange(flats, tag))

    def _exchange(
        self, flats: Mapping[int, Tensor], first_tag: int
    ) -> tuple[list[PendingTransfer], list[PendingTransfer]]:
        """Start the transfers to and from the neighbours' owners; return (receives, sends)."""
        if self._link is None:
            return [], []
        out, back = (
            [Transfer(peer, node, flats[node]) for peer, nodes in route.items() for node in nodes]
            for route in (self._routes.out, self._routes.back)
        )
        return start_transfers(self._link, first_tag, out, back)

    def _mixed(
        self, node: int, bucket: Bucket, flats: Mapping[int, Tensor], distances: Distances
    ) -> Tensor:
        """Return a node's mixed values in the bucket's dtype, and add to the node's `Distances`."""
        device = flats[node].device
        mixed = self._flat(-1, 0, bucket, device)
        buffers = [self._buffer(i, device) for i in range(4)]
        for part in _slices(bucket.numel):
            acc, value, before, away = (buffer[: part.stop - part.start] for buffer in buffers)
            before.copy_(flats[node][part])
            for place, (j, weight) in enumerate(self._weights[node].items()):
                # Product and sum are separate, so that they are never fused: the bits must not
                # depend on the place of an element in a vector.
                target = value if place else acc
                target.copy_(flats[j][part])
                if j != node:
                    distances.apart += weight * _square(torch.sub(target, before, out=away))
                target.mul_(weight)
                if place:
                    acc.add_(value)
            mixed[part].copy_(acc)
            distances.moved += _square(torch.sub(acc, before, out=away))
        return mixed

    def _flat(self, node: int, index: int, bucket: Bucket, device: torch.device) -> Tensor:
        """Return flat storage for a node's bucket; the bucket WINDOW places later gets the same."""
        key, size_bytes = (node, index % WINDOW), bucket.numel * bucket.dtype.itemsize
        held = self._pool.get(key)
        if held is None or held.numel() < size_bytes or held.device != device:
            held = torch.empty(max(size_bytes, 1), dtype=torch.uint8, device=device)
            self._pool[key] = held
        return held[:size_bytes].view(bucket.dtype)

    def _buffer(self, index: int, device: torch.device) -> Tensor:
        held = self._scratch.get(index)
        if held is None or held.device != device:
            held = torch.empty(SLICE_ELEMENTS, dtype=torch.float64, device=device)
            self._scratch[index] = held
        return held

    def _tags(self, count: int) -> int:
        """Reserve `count` message tags, in the same order on all members; return the first."""
        if self._next_tag + count > MAX_TAG:
            self._next_tag = 0
        first = self._next_tag
        self._next_tag += count
        return first

    def _send(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer:
        assert self._link is not None
        return self._link.send(peer, tag, tensor)

    def _receive(self, peer: int, tag: int, tensor: Tensor) -> PendingTransfer:
        assert self._link is not None
        return self._link.recv(peer, tag, tensor)

    def _wait(self, works: Sequence[PendingTransfer]) -> None:
        if self._waiter is not None:
            self._waiter.wait(works)
        elif self._is_cut:
            raise ExchangeError("the exchange was cut")


def _routes(rank: int, nodes: Sequence[range], weights: Sequence[Mapping[int, float]]) -> _Routes:
    """Plan the routes: a node is sent once to each member that owns a neighbour of it."""

    def needed(by: int, of: int) -> tuple[int, ...]:
        wanted = {j for node in nodes[by] for j in weights[node]}
        return tuple(node for node in nodes[of] if node in wanted)

    peers = [peer for peer in range(len(nodes)) if peer != rank]
    return _Routes(
        out={peer: needed(peer, rank) for peer in peers},
        back={peer: needed(rank, peer) for peer in peers},
    )


def _square(flat: Tensor) -> float:
    """Return the squared 2-norm of a flat tensor."""
    return float(torch.dot(flat, flat))


def _slices(numel: int) -> Iterator[slice]:
    for start in range(0, numel, SLICE_ELEMENTS):
        yield slice(start, min(start + SLICE_ELEMENTS, numel))


# ---- Waits that can be abandoned ----
#
# A transfer whose connection was cut may never report it (gloo), and a thread that waits for it
# cannot be interrupted. So a separate thread waits, which the caller can abandon.


class Waiter:
    """A thread that waits for the transfers of one link, and cuts the link on failure."""

    def __init__(self, link: Link, *, deadline_s: float) -> None:
        self._link, self._deadline_s = link, deadline_s
        self._changed = threading.Condition()
        self._works: list[PendingTransfer] | None = None  # guarded by _changed, as is all below
        self._error = ""
        self._is_closed = False
        threading.Thread(target=self._main, name="gossip", daemon=True).start()

    def wait(self, works: Sequence[PendingTransfer]) -> None:
        """Wait until all transfers have succeeded. Raises ExchangeError, soon after a cut."""
        with self._changed:
            if works and not self._error:
                self._works = list(works)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._works is None or self._error)
                self._changed.wait_for(lambda: self._works is None, ABANDON_S)
            if self._error:
                raise ExchangeError(self._error)

    def fail(self, reason: str) -> None:
        """Make the present and all later waits fail. May be called from any thread, repeatedly."""
        with self._changed:
            self._error = self._error or reason
            self._changed.notify_all()
        self._link.cut()

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _main(self) -> None:
        while (works := self._next()) is not None:
            try:
                while works:
                    works.pop(0).wait(self._deadline_s)
            except ExchangeError as error:
                # Only the message is kept: a traceback would keep transfers and the group alive.
                self.fail(str(error))
            except BaseException as error:  # a defect of ours must not leave the caller waiting
                self.fail(f"the thread that waits has ended: {error!r}")
                raise
            works.clear()
            with self._changed:
                self._works = None
                self._changed.notify_all()

    def _next(self) -> list[PendingTransfer] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._works is not None or self._is_closed)
            return self._works
