"""Carry partial sums to a coordinator that adds them, and carry the sums back.

`ServerTransport` connects the torch thread and an event loop. On the torch side it is a
`ReductionTransport`. On the loop's side it is an *outbox*, partial sums bucket by bucket as
backward finishes them, and an *inbox*, a separate buffer into which sums are staged and which
counts only when committed. So a stream that breaks can start again, in either direction. On a CUDA
device the outbox is copied to the host bucket by bucket, during backward (`mesh.staging`). The
module knows neither gRPC nor the coordinator.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from stratagem.common.compression import TensorLayout
from stratagem.common.compression.table import are_forwarded
from stratagem.common.numerics.shards import Node
from stratagem.common.tensors.torch_codec import bytes_of
from stratagem.worker.exchange.buckets import GradientBuckets
from stratagem.worker.exchange.coded_gather import Summing, put
from stratagem.worker.exchange.compressor import Compressor
from stratagem.worker.exchange.layout import BucketLayout, StepPlan
from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.mesh.staging import HostCopy, SideStream, host_room, to_host

# ---- Payloads ----
#
#     SumFreight     up: the member's partial sums, bucket by bucket; down: the sums
#     CodedFreight   up: the messages of the member's shards; down: the messages of all shards, or
#                    their sum, whichever is fewer bytes
#
# Both ends follow the same rules, which depend on sizes alone.


@dataclass(frozen=True, slots=True)
class StreamVector:
    """A vector that a member sends in a step."""

    bucket: int
    node: Node
    dtype: str
    numel: int
    size_bytes: int


class Freight(Protocol):
    """Interface of a step's payloads to the server and back; the object is reused for each step."""

    inbox: list[Tensor]
    """The buffers for the returned values, in order."""

    @property
    def layout(self) -> tuple[TensorLayout, ...]:
        """The names and shapes of coded tensors; empty if the payload consists of sums."""

    def begin(
        self, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        """Start a step; arguments as in `ReductionTransport.begin`."""

    def entries(self) -> tuple[StreamVector, ...]:
        """Return the vectors that this member sends up, in order."""

    def part(self, bucket: int) -> list[Tensor]:
        """Return the vectors that can be sent once the buckets up to this one are final."""

    def unload(self) -> None:
        """Write the sums, divided, into set 0, once all of the inbox is staged."""


class SumFreight:
    """The payloads of a step as uncoded partial sums, sent from the buckets."""

    layout: tuple[TensorLayout, ...] = ()

    def __init__(self, layout: BucketLayout, rank: int, device: torch.device) -> None:
        """Plan the vectors. device: that of the buckets."""
        self._rank = rank
        self.inbox = [host_room((bucket.numel,), bucket.dtype, device) for bucket in layout.buckets]
        self._nodes: tuple[Node, ...] = ()
        self._sets: Sequence[Sequence[Tensor]] = ()
        self._divisor: float | None = None

    def begin(
        self, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        self._nodes, self._sets, self._divisor = step.nodes[self._rank], sets, divisor

    def entries(self) -> tuple[StreamVector, ...]:
        return tuple(
            _entry(index, node, one_set[index])
            for index in range(len(self.inbox))
            for node, one_set in zip(self._nodes, self._sets, strict=False)
        )

    def part(self, bucket: int) -> list[Tensor]:
        return [one_set[bucket] for one_set in self._sets[: len(self._nodes)]]

    def unload(self) -> None:
        put(self._sets[0], self.inbox, self._divisor, has_extras=True)


class CodedFreight:
    """Coded messages of the member's shards to the server; back come the messages of all shards, or
    if these are more bytes, the sums."""

    def __init__(self, buckets: GradientBuckets, compressor: Compressor, rank: int) -> None:
        self._buckets, self._compressor, self._rank = buckets, compressor, rank
        self.layout, self.codec = compressor.layout, compressor.name
        self.inbox: list[Tensor] = []
        self._step: StepPlan | None = None
        self._sets: Sequence[Sequence[Tensor]] = ()
        self._divisor: float | None = None

    def pays_off(self, step: StepPlan) -> bool:
        """Return whether coded messages are fewer bytes than partial sums, over all members."""
        num_sums = sum(len(nodes) for nodes in step.nodes)
        compressor = self._compressor
        return step.num_live * compressor.message_bytes < num_sums * compressor.raw_bytes

    def begin(
        self, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        self._step, self._sets, self._divisor = step, sets, divisor
        compressor = self._compressor
        if self._are_forwarded:
            num_bytes = step.num_live * compressor.message_bytes
            self.inbox = [self._room(num_bytes, torch.uint8)]
        else:
            numel = sum(tensor.numel for tensor in compressor.layout)
            self.inbox = [
                self._room(numel, torch.float32),
                self._room(self._buckets.num_extras, torch.float64),
            ]

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        return host_room((numel,), dtype, self._buckets.device)

    @property
    def _are_forwarded(self) -> bool:
        assert self._step is not None
        compressor = self._compressor
        return are_forwarded(self._step.num_live, compressor.message_bytes, compressor.raw_bytes)

    def entries(self) -> tuple[StreamVector, ...]:
        assert self._step is not None
        size = self._compressor.message_bytes
        return tuple(StreamVector(0, Node(s, s + 1), "uint8", size, size) for s in self._step.live)

    def part(self, bucket: int) -> list[Tensor]:
        assert self._step is not None
        if bucket < len(self._buckets.layout.buckets) - 1:
            return []
        return [self._compressor.message(shard) for shard in self._step.live]

    def unload(self) -> None:
        assert self._step is not None
        if self._are_forwarded:
            self._add_up(self._step)
        else:
            self._take_sums()
        num_messages, num_sums = len(self._step.live), len(self._step.nodes[self._rank])
        compressor = self._compressor
        compressor.count(num_messages * compressor.message_bytes, num_sums * compressor.raw_bytes)

    def _add_up(self, step: StepPlan) -> None:
        compressor, size = self._compressor, self._compressor.message_bytes
        portions = compressor.portions(self._buckets.layout)
        pieces = {
            shard: compressor.cut(self.inbox[0][shard * size : (shard + 1) * size], portions)
            for shard in range(step.num_live)
            if shard not in step.live
        }
        for portion in portions:
            parts = [[flats[bucket] for bucket in portion.buckets] for flats in self._sets]
            partials = dict(zip(step.nodes[self._rank], parts, strict=False))
            incoming = {shard: cut[portion.index] for shard, cut in pieces.items()}
            summing = Summing(self._buckets, compressor, portion, partials, incoming)
            put(parts[0], summing.total(step.num_live), self._divisor, portion.has_extras)

    def _take_sums(self) -> None:
        views, start = self._buckets.views_of(self._sets[0], self._buckets.all), 0
        for view in views:
            view.copy_(self.inbox[0][start : start + view.numel()].view(view.shape))
            start += view.numel()
        self._sets[0][-1].copy_(self.inbox[1])
        put(self._sets[0], self._sets[0], self._divisor, has_extras=True)


def _entry(bucket: int, node: Node, tensor: Tensor) -> StreamVector:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StreamVector(bucket, node, dtype, tensor.numel(), tensor.nbytes)


# ---- Server transport ----


@dataclass(slots=True)
class _Open:
    """The step in progress: its payloads, and the bytes staged so far."""

    number: int
    freight: Freight
    inbox: list[memoryview]
    outbox: list[list[HostCopy]] = field(default_factory=list)
    """Host copies of the vectors to send, by launched bucket."""
    num_staged_bytes: int = 0
    is_committed: bool = False

    @property
    def num_expected_bytes(self) -> int:
        return sum(view.nbytes for view in self.inbox)


class ServerTransport:
    """A `ReductionTransport` for the torch thread, whose content is streamed by the event loop."""

    name = "server"

    def __init__(
        self,
        layout: BucketLayout,
        rank: int,
        side: SideStream,
        *,
        deadline_s: float,
        coded: CodedFreight | None = None,
    ) -> None:
        """Begin without a step. coded: the payloads to send instead of sums if they are smaller."""
        self.deadline_s = deadline_s
        self.num_buckets = len(layout.buckets)
        self._sums, self._coded = SumFreight(layout, rank, side.device), coded
        self._side = side
        self._changed = threading.Condition()
        self._open: _Open | None = None  # guarded by _changed, as all below
        self._error = ""
        self._waiters: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    # The torch thread.

    def begin(
        self, number: int, step: StepPlan, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        freight: Freight = self._sums
        if self._coded is not None and self._coded.pays_off(step):
            freight = self._coded
        freight.begin(step, sets, divisor)
        inbox = [bytes_of(tensor) for tensor in freight.inbox]
        with self._changed:
            self._open = _Open(number, freight, inbox)
            self._notify()

    def launch(self, bucket: int) -> None:
        with self._changed:
            if self._open is not None:
                self._side.follow(self._side.mark())
                with self._side.entered():
                    part = [to_host(tensor) for tensor in self._open.freight.part(bucket)]
                self._open.outbox.append(part)
            self._notify()

    def finish(self) -> None:
        with self._changed:
            opened = self._open
            assert opened is not None
            in_time = self._changed.wait_for(
                lambda: opened.is_committed or self._error, self.deadline_s
            )
            if not in_time:
                self._error = f"no sums came within {self.deadline_s} s"
                self._notify()
            if self._error:
                raise ExchangeError(self._error)
            self._open = None
        opened.freight.unload()

    def cut(self) -> None:
        with self._changed:
            self._error = self._error or "the exchange was cut"
            self._notify()

    def close(self) -> None:
        self.cut()

    # The event loop.

    async def step_after(self, applied: int) -> int:
        """Wait for a step after `applied` ones; return its number, which may be higher than the
        next, since steps without exchange are skipped."""
        while True:
            with self._changed:
                if self._error:
                    raise ExchangeError(self._error)
                opened = self._open
                if opened is not None and opened.number > applied and not opened.is_committed:
                    return opened.number
                waiter = self._waiter()
            await self._wait(waiter)

    async def freight(self, step: int) -> Freight:
        """Wait for the step to begin, and return its payloads."""
        return (await self._until(step, lambda _: True)).freight

    async def partials(self, step: int, bucket: int) -> list[memoryview]:
        """Wait until a bucket is final; return its payload in the order of the header, valid until
        the commit. In a coded step only the last bucket has a payload."""
        opened = await self._until(step, lambda state: len(state.outbox) > bucket)
        return [bytes_of(await copy.arrive()) for copy in opened.outbox[bucket]]

    @property
    def codec(self) -> str:
        """Return the codec of coded steps; "" if no step is ever coded."""
        return "" if self._coded is None else self._coded.codec

    def stage(self, step: int, offset: int, data: bytes | memoryview) -> None:
        """Store the next bytes of the sums. Offset 0 starts again and drops all earlier bytes."""
        with self._changed:
            opened = self._current(step)
            expected = 0 if offset == 0 else opened.num_staged_bytes
            total_bytes = opened.num_expected_bytes
            if offset != expected or offset + len(data) > total_bytes:
                raise ValueError(
                    f"sums at offset {offset} with {len(data)} bytes: expected offset {expected} "
                    f"and at most {total_bytes} bytes in all"
                )
            _write(opened.inbox, offset, memoryview(data).cast("B"))
            opened.num_staged_bytes = offset + len(data)

    def commit(self, step: int) -> None:
        """Let `finish` continue with the staged sums, which must be complete."""
        with self._changed:
            opened = self._current(step)
            total_bytes = opened.num_expected_bytes
            if opened.num_staged_bytes != total_bytes:
                raise ValueError(f"commit after {opened.num_staged_bytes} of {total_bytes} bytes")
            opened.is_committed = True
            self._notify()

    def _current(self, step: int) -> _Open:
        if self._error:
            raise ExchangeError(self._error)
        if self._open is None or self._open.number != step or self._open.is_committed:
            raise ExchangeError(f"step {step} is not under way here")
        return self._open

    async def _until(self, step: int, is_ready: Callable[[_Open], bool]) -> _Open:
        """Wait until the step has begun and `is_ready` is true. Raises ExchangeError when cut, or
        if a later step has begun."""
        while True:
            with self._changed:
                if self._error:
                    raise ExchangeError(self._error)
                opened = self._open
                if opened is not None and opened.number > step:
                    raise ExchangeError(f"step {step} is over, step {opened.number} is under way")
                if opened is not None and opened.number == step and is_ready(opened):
                    return opened
                waiter = self._waiter()
            await self._wait(waiter)

    def _waiter(self) -> asyncio.Future[None]:
        """Return a future that resolves at the next change; requires the lock `_changed`."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[waiter] = loop
        return waiter

    async def _wait(self, waiter: asyncio.Future[None]) -> None:
        try:
            await waiter
        finally:
            with self._changed:
                self._waiters.pop(waiter, None)

    def _notify(self) -> None:
        """Wake the torch thread and the event loop's waiters; requires the lock `_changed`."""
        self._changed.notify_all()
        for waiter, loop in self._waiters.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, waiter)
        self._waiters = {}


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _write(inbox: Sequence[memoryview], offset: int, data: memoryview) -> None:
    start = 0  # of the vector
    for view in inbox:
        if data.nbytes and start <= offset < start + view.nbytes:
            num_bytes = min(data.nbytes, start + view.nbytes - offset)
            view[offset - start : offset - start + num_bytes] = data[:num_bytes]
            data, offset = data[num_bytes:], offset + num_bytes
        start += view.nbytes
