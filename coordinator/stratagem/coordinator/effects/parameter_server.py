"""ParameterServer adds up the gradients that flow through the coordinator, and keeps none of them.

One step covers a fixed set of members: read the same window of bytes from every member, add the
windows in tree order, and send the sum to all; when all members hold all sums, commit. Where
replicas are pipelines, each column of equal stages is such a set with steps of its own. Memory is
a few windows per member; a member with several shards sends its partial sums one after the other,
and all but the last are held for one bucket. The small messages of coded shards are read whole
(see common/compression/table.py).

A step that breaks is asked for again, since members keep their gradients until a commit. Members
that differ (one applied, another did not) re-form and heal.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import structlog
from numpy.typing import NDArray

from stratagem.common.base.errors import IntegrityError, StratagemError, UnavailableError
from stratagem.common.compression import TensorLayout
from stratagem.common.numerics.shards import Node, tree_sum
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.common.tensors.manifest import (
    Limits,
    Manifest,
    Purpose,
    build_manifest,
    from_proto,
    to_proto,
)
from stratagem.common.tensors.stream import CHUNK_BYTES, ChunkWriter, fill_chunk, sent
from stratagem.coordinator.core.commands import ReportTrouble
from stratagem.coordinator.core.effects import RunSegment
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.effects.context import EffectContext, LiveRuns
from stratagem.coordinator.runtime.links import WorkerLink, session
from stratagem.coordinator.updates.reading import codec_of, reply_to
from stratagem.v1 import worker_pb2

# ---- Steps ----

RETRY_S = 0.02
"""The pause before a retry: members may be meeting again, or not know their membership yet."""

log = structlog.get_logger()


async def serve_steps(env: EffectContext, effect: RunSegment, members: Sequence[Member]) -> None:
    """Sum the gradients of these members, step after step, until the segment's last step."""
    step = -1
    while step < effect.to_step:
        links = [env.workers.link(member) for member in members]
        try:
            step = await _Step(env.runs, effect, links, env.transfers.limits).serve()
        except StratagemError as error:
            log.debug("step is asked for again", run_id=effect.run_id, reason=str(error))
            await asyncio.sleep(RETRY_S)


@dataclass(frozen=True, slots=True)
class _Part:
    """One partial sum of gradients in a member's stream: one bucket, summed over some shards."""

    bucket: str
    node: Node
    dtype: str
    size_bytes: int


class _Inflow:
    """The gradient stream of one member: a header, then exact numbers of bytes."""

    def __init__(self, messages: AsyncIterator[worker_pb2.GetGradientsResponse]) -> None:
        self._messages = messages
        self._buffer = bytearray()
        self._writer: ChunkWriter | None = None
        self.step = 0
        self.parts: list[_Part] = []
        self.coded: tuple[TensorLayout, ...] = ()
        """The layout of the tensors that coded parts encode; empty if the parts are plain sums."""

    async def open(self, limits: Limits, codec: str) -> None:
        """Read the header of a member's gradient stream, and check it."""
        first = await anext(self._messages, None)
        if first is None:
            raise IntegrityError("a gradient stream ended before its header")
        codecs = ("", codec)
        manifest = from_proto(first.header.manifest, limits, Purpose.GRADIENTS, codecs)
        self.coded = tuple(TensorLayout(t.name, tuple(t.shape)) for t in first.header.coded)
        self.step = first.header.step
        self.parts = [_part(spec.name, spec.dtype, spec.size_bytes) for spec in manifest.tensors]
        self._writer = ChunkWriter(
            manifest.total_bytes,
            lambda _offset, data: self._buffer.extend(data),
            purpose=Purpose.GRADIENTS,
        )

    async def read(self, num_bytes: int) -> bytes:
        """Return the next num_bytes of the member's gradient stream."""
        assert self._writer is not None
        while len(self._buffer) < num_bytes:
            message = await anext(self._messages, None)
            if message is None:
                raise IntegrityError("a gradient stream ended before its announced length")
            self._writer.write(message.chunk)
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return data


def _part(name: str, dtype: str, size_bytes: int) -> _Part:
    bucket, _, node = name.partition("/")
    first, _, stop = node.partition(":")
    return _Part(bucket, Node(int(first), int(stop)), dtype, size_bytes)


class _Step:
    """One step of the parameter server: read the members' gradients, send their sums, commit."""

    def __init__(
        self, runs: LiveRuns, effect: RunSegment, links: Sequence[WorkerLink], limits: Limits
    ) -> None:
        self._runs = runs
        self._effect = effect
        self._links = links
        self._limits = limits
        self._codec = codec_of(runs.job_of(effect.run_id, effect.party))

    async def serve(self) -> int:
        """Serve the next step and return its number. If the members are at different steps, report
        that and return to_step."""
        session_ref = session(self._effect.run_id, self._effect.party)
        gets = [
            link.stub.GetGradients(
                worker_pb2.GetGradientsRequest(
                    fence=link.fence(self._effect.membership), session=session_ref
                )
            )
            for link in self._links
        ]
        try:
            inflows = [_Inflow(aiter(get)) for get in gets]
            await asyncio.gather(*(inflow.open(self._limits, self._codec) for inflow in inflows))
            steps = {inflow.step for inflow in inflows}
            if len(steps) > 1:
                effect, reason = self._effect, f"members are at different steps: {sorted(steps)}"
                trouble = ReportTrouble(effect.run_id, effect.party, effect.membership, reason)
                await self._runs.loop.submit(trouble)
                return effect.to_step
            await self._sum(inflows)
            return inflows[0].step
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError:  # gRPC's word for a write into a call that has ended
            raise UnavailableError("a member has ended its stream of sums early") from None
        finally:
            for get in gets:
                get.cancel()

    async def _sum(self, inflows: list[_Inflow]) -> None:
        step = inflows[0].step
        if any(inflow.coded for inflow in inflows):
            messages, layout = await _messages(inflows)
            job = self._runs.job_of(self._effect.run_id, self._effect.party)
            numerics = self._runs.numerics_of(self._effect.run_id)
            reply = await asyncio.to_thread(reply_to, job, layout, messages, step, numerics)
            manifest, windows = reply.manifest, reply.windows()
        else:
            buckets = _buckets(inflows)
            manifest, windows = _sums(buckets), _summed(inflows, buckets)
        outflow = _Outflow(self._effect, self._links, step, manifest)
        try:
            await outflow.open()
            async for window in windows:
                await outflow.write(window)
            failpoint("coordinator.step.summed")
            await outflow.commit()
        finally:
            outflow.cancel()


class _Outflow:
    """The outgoing streams of one step: each member receives the same bytes, then the commit."""

    def __init__(
        self, effect: RunSegment, links: Sequence[WorkerLink], step: int, manifest: Manifest
    ) -> None:
        self._calls = [link.stub.ApplyGradients() for link in links]
        self._header = worker_pb2.ApplyGradientsRequest(
            header=worker_pb2.ApplyGradientsHeader(
                fence=links[0].fence(effect.membership),
                session=session(effect.run_id, effect.party),
                step=step,
                manifest=to_proto(manifest),
            )
        )
        self._offset = 0

    async def open(self) -> None:
        """Send the header of the sums to every member."""
        await self._send(self._header)

    async def write(self, data: bytes) -> None:
        """Send one window, i.e. range of bytes, of the sums."""
        message = worker_pb2.ApplyGradientsRequest()
        fill_chunk(message.chunk, self._offset, data)
        self._offset += len(data)
        sent(Purpose.GRADIENTS).num_bytes += len(data) * len(self._calls)
        await self._send(message)

    async def commit(self) -> None:
        """Have all members apply the sums that they hold, and wait until they have."""
        await self._send(worker_pb2.ApplyGradientsRequest(commit=True))
        for call in self._calls:
            await call.done_writing()
        await asyncio.gather(*self._calls)

    def cancel(self) -> None:
        """Cancel the streams; members discard sums that are not committed."""
        for call in self._calls:
            call.cancel()

    async def _send(self, message: worker_pb2.ApplyGradientsRequest) -> None:
        await asyncio.gather(*(call.write(message) for call in self._calls))


def _buckets(inflows: Sequence[_Inflow]) -> list[tuple[str, str, int]]:
    """Return (name, dtype, bytes) of each bucket of gradients, in which all members must agree."""
    layouts = [
        list(dict.fromkeys((part.bucket, part.dtype, part.size_bytes) for part in inflow.parts))
        for inflow in inflows
        if inflow.parts
    ]
    if any(layout != layouts[0] for layout in layouts):
        raise IntegrityError("the members' gradients are laid out differently")
    return layouts[0]


def _sums(buckets: Sequence[tuple[str, str, int]]) -> Manifest:
    named = [
        (name, dtype, (size_bytes // np.dtype(dtype).itemsize,))
        for name, dtype, size_bytes in buckets
    ]
    return build_manifest(named, Purpose.GRADIENTS)


async def _messages(inflows: Sequence[_Inflow]) -> tuple[list[bytes], tuple[TensorLayout, ...]]:
    """Return the coded gradients of all shards with rows, in order, and the tensors' layout."""
    layouts = {inflow.coded for inflow in inflows if inflow.parts}
    sizes = {part.size_bytes for inflow in inflows for part in inflow.parts}
    shards = [part.node for inflow in inflows for part in inflow.parts]
    expected = [Node(shard, shard + 1) for shard in range(len(shards))]
    if len(layouts) != 1 or len(sizes) != 1 or sorted(shards) != expected:
        raise IntegrityError("the members' coded gradients do not make one step")
    messages = dict.fromkeys(expected, b"")
    for inflow in inflows:
        for part in inflow.parts:
            messages[part.node] = await inflow.read(part.size_bytes)
    return list(messages.values()), layouts.pop()


async def _summed(
    inflows: Sequence[_Inflow], buckets: Sequence[tuple[str, str, int]]
) -> AsyncGenerator[bytes, None]:
    """Yield the sums of all buckets (flat vectors of gradients), window by window."""
    for bucket, dtype, size_bytes in buckets:
        async for window in _summed_bucket(inflows, bucket, dtype, size_bytes):
            yield window


async def _summed_bucket(
    inflows: Sequence[_Inflow], bucket: str, dtype: str, size_bytes: int
) -> AsyncGenerator[bytes, None]:
    """Yield the sum of one bucket, window by window, added in tree order."""
    nodes = [[p.node for p in inflow.parts if p.bucket == bucket] for inflow in inflows]
    held = [
        [await inflow.read(size_bytes) for _ in row[:-1]]
        for inflow, row in zip(inflows, nodes, strict=True)
    ]
    for start in range(0, size_bytes, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, size_bytes)
        windows = await asyncio.gather(
            *(inflow.read(stop - start) for inflow, row in zip(inflows, nodes, strict=True) if row)
        )
        latest = iter(windows)
        partials = [
            {
                **{
                    n: np.frombuffer(d[start:stop], dtype) for n, d in zip(row, whole, strict=False)
                },
                **({row[-1]: np.frombuffer(next(latest), dtype)} if row else {}),
            }
            for row, whole in zip(nodes, held, strict=True)
        ]
        num_live = max(node.stop for row in nodes for node in row)
        yield fold_chunks(partials, num_live).tobytes()


# ---- Tree sum ----
#
# Partial sums are added in the same tree as in the workers' mesh, so both engines give the same
# bits. The functions work on any range of a bucket, since elements are independent. They are pure
# and do not import torch.

FloatArray = NDArray[np.floating[Any]]


def fold_chunks(members: Iterable[Mapping[Node, FloatArray]], num_live: int) -> FloatArray:
    """Return the sum over shards [0, num_live) of one range of one bucket.

    members: each member's partial sums of that range, keyed by node of the sum tree. All arrays
    have one length and dtype (float32 or float64). None is modified; the result is a new array.
    Raises ValueError if a shard is missing or held twice.
    """
    partials: dict[Node, FloatArray] = {}
    for held in members:
        for node, chunk in held.items():
            if node in partials:
                raise ValueError(f"two members hold {node}")
            partials[node] = chunk
    _check(partials, num_live)
    made: set[int] = set()  # ids of arrays made here, which may be overwritten

    def add(left: FloatArray, right: FloatArray) -> FloatArray:
        for out in (left, right):
            if id(out) in made:
                return np.add(left, right, out=out)
        total = np.add(left, right)
        made.add(id(total))
        return total

    total = tree_sum(partials, num_live, add)
    return total if id(total) in made else total.copy()


def _check(partials: Mapping[Node, FloatArray], num_live: int) -> None:
    kinds = {(chunk.dtype, chunk.shape) for chunk in partials.values()}
    if len(kinds) > 1:
        raise ValueError(f"partial sums differ in dtype or length: {kinds}")
    num_held = sum(node.stop - node.first for node in partials)
    if num_held != num_live:
        raise ValueError(f"partial sums hold {num_held} shards, the step has {num_live}")
