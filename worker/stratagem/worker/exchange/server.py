"""Carries partial sums to a coordinator that adds them, and the sums back.

The hand-over between the torch thread and an event loop. On the torch side it is a `Transport`.
On the loop's side it is an *outbox*, partial sums bucket by bucket as backward finishes them, and
an *inbox*, a buffer of its own into which sums are staged and which counts only when committed.
So a stream that breaks can be begun again from the start, in either direction.
Knows neither gRPC nor the coordinator.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, empty

from stratagem.common.shards import Node
from stratagem.worker.exchange.layout import Layout
from stratagem.worker.exchange.plan import Step
from stratagem.worker.mesh.link import ExchangeError


@dataclass(frozen=True, slots=True)
class Entry:
    """One vector of a stream. `node` is None in the inbox, where vectors are whole sums."""

    bucket: int
    node: Node | None
    dtype: str
    numel: int
    size_bytes: int


@dataclass(slots=True)
class _Open:
    """The step under way."""

    number: int
    nodes: tuple[Node, ...]
    sets: Sequence[Sequence[Tensor]]
    divisor: float | None
    num_launched: int = 0
    """Buckets."""
    num_staged_bytes: int = 0
    is_committed: bool = False


class ServerTransport:
    """A `Transport` on the torch thread; header, partials, stage and commit on the loop."""

    name = "server"

    def __init__(self, layout: Layout, rank: int, *, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._layout, self._rank = layout, rank
        self._inbox = [empty(bucket.numel, dtype=bucket.dtype) for bucket in layout.buckets]
        self._inbox_bytes = [_bytes_of(tensor) for tensor in self._inbox]
        self.total_bytes = sum(view.nbytes for view in self._inbox_bytes)
        self._changed = threading.Condition()
        self._open: _Open | None = None  # guarded by _changed, as all below
        self._error = ""
        self._waiters: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    # The torch thread.

    def begin(
        self, number: int, step: Step, sets: Sequence[Sequence[Tensor]], divisor: float | None
    ) -> None:
        with self._changed:
            self._open = _Open(number, step.nodes[self._rank], sets, divisor)
            self._notify()

    def launch(self, bucket: int) -> None:
        with self._changed:
            if self._open is not None:
                self._open.num_launched = bucket + 1
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
        for tensor, staged in zip(opened.sets[0], self._inbox, strict=True):
            tensor.copy_(staged)
        if opened.divisor is not None:
            for tensor in opened.sets[0][:-1]:
                tensor.div_(opened.divisor)

    def cut(self) -> None:
        with self._changed:
            self._error = self._error or "the exchange was cut"
            self._notify()

    def close(self) -> None:
        self.cut()

    # The event loop.

    async def header(self, step: int) -> tuple[Entry, ...]:
        """What this member will send in the step, in order. Waits for the step to begin."""
        opened = await self._until(step, lambda _: True)
        return tuple(
            Entry(index, node, _dtype_name(tensor), tensor.numel(), tensor.nbytes)
            for index in range(len(self._layout.buckets))
            for node, one_set in zip(opened.nodes, opened.sets, strict=False)
            for tensor in [one_set[index]]
        )

    async def partials(self, step: int, bucket: int) -> list[memoryview]:
        """The partial sums of one bucket, in the header's order. Waits until they are final;
        they stay so until the step is committed."""
        opened = await self._until(step, lambda state: state.num_launched > bucket)
        sets = opened.sets[: len(opened.nodes)]
        return [_bytes_of(one_set[bucket]) for one_set in sets]

    def sums(self) -> tuple[Entry, ...]:
        """What must be staged, in order."""
        return tuple(
            Entry(index, None, _dtype_name(tensor), tensor.numel(), tensor.nbytes)
            for index, tensor in enumerate(self._inbox)
        )

    def stage(self, step: int, offset: int, data: bytes | memoryview) -> None:
        """Takes the next bytes of the sums. Offset 0 begins anew, whatever came before."""
        with self._changed:
            opened = self._current(step)
            expected = 0 if offset == 0 else opened.num_staged_bytes
            if offset != expected or offset + len(data) > self.total_bytes:
                raise ValueError(
                    f"sums at offset {offset} with {len(data)} bytes: expected offset {expected} "
                    f"and at most {self.total_bytes} bytes in all"
                )
            self._write(offset, memoryview(data).cast("B"))
            opened.num_staged_bytes = offset + len(data)

    def commit(self, step: int) -> None:
        """Releases finish. Every byte must have been staged."""
        with self._changed:
            opened = self._current(step)
            if opened.num_staged_bytes != self.total_bytes:
                raise ValueError(
                    f"commit after {opened.num_staged_bytes} of {self.total_bytes} bytes"
                )
            opened.is_committed = True
            self._notify()

    def _write(self, offset: int, data: memoryview) -> None:
        start = 0  # of the bucket
        for view in self._inbox_bytes:
            if data.nbytes and start <= offset < start + view.nbytes:
                num_bytes = min(data.nbytes, start + view.nbytes - offset)
                view[offset - start : offset - start + num_bytes] = data[:num_bytes]
                data, offset = data[num_bytes:], offset + num_bytes
            start += view.nbytes

    def _current(self, step: int) -> _Open:
        if self._error:
            raise ExchangeError(self._error)
        if self._open is None or self._open.number != step or self._open.is_committed:
            raise ExchangeError(f"step {step} is not under way here")
        return self._open

    async def _until(self, step: int, is_ready: Callable[[_Open], bool]) -> _Open:
        """Waits until the step has begun and is_ready. Raises ExchangeError when cut, or when a
        later step is under way."""
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if self._error:
                    raise ExchangeError(self._error)
                opened = self._open
                if opened is not None and opened.number > step:
                    raise ExchangeError(f"step {step} is over, step {opened.number} is under way")
                if opened is not None and opened.number == step and is_ready(opened):
                    return opened
                waiter: asyncio.Future[None] = loop.create_future()
                self._waiters[waiter] = loop
            try:
                await waiter
            finally:
                with self._changed:
                    self._waiters.pop(waiter, None)

    def _notify(self) -> None:
        """Wakes both sides; _changed is held."""
        self._changed.notify_all()
        for waiter, loop in self._waiters.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, waiter)
        self._waiters = {}


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a flat tensor; on the CPU without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(tensor.detach().cpu().numpy().data).cast("B")
