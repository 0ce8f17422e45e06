"""The worker's end of ParameterServer: GetGradients and ApplyGradients on one session.

The module keeps the open server transport, with its membership and step, and turns its outbox and
inbox into streams. It runs on the event loop; the torch thread only reports its progress.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

from stratagem.common.base.errors import (
    ConflictError,
    InvalidInputError,
    StaleError,
    UnavailableError,
)
from stratagem.common.rpc.tensor_transfer import receive_chunks
from stratagem.common.tensors.manifest import (
    Manifest,
    Purpose,
    build_manifest,
    from_proto,
    to_proto,
)
from stratagem.common.tensors.stream import ChunkWriter, iter_frames, iter_views, sent
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.tensor_pb2 import TensorSpec
from stratagem.worker.exchange.parameter_server import ServerTransport, StreamVector
from stratagem.worker.mesh.link import ExchangeError


class GradientPort:
    """The gRPC side of a session's exchange with the coordinator, which adds the gradients."""

    def __init__(self) -> None:
        self._transport: ServerTransport | None = None
        self._membership = -1
        self._applied = 0
        self._changed = asyncio.Event()

    # ---- Posts of the torch thread ----

    def open(self, membership: int, applied: int, transport: ServerTransport) -> None:
        """Set the exchange of a membership. applied: the number of steps applied."""
        self._transport, self._membership, self._applied = transport, membership, applied
        self._wake()

    def see_applied(self, step: int) -> None:
        self._applied = step
        self._wake()

    def close(self) -> None:
        """Remove the exchange, once the session has left it."""
        self._transport = None
        self._wake()

    # ---- Requests of the coordinator ----

    async def outgoing(
        self, membership: int, wait_s: float
    ) -> AsyncGenerator[pb.GetGradientsResponse, None]:
        """Stream the partial sums of the next step that is exchanged, bucket by bucket.

        Raises UnavailableError when the session does not join the membership within wait_s.
        """
        transport = await self._at(membership, wait_s)
        try:
            step = await transport.step_after(self._applied)
            freight = await transport.freight(step)
            manifest = _manifest(freight.entries(), transport.codec if freight.layout else "")
            yield pb.GetGradientsResponse(
                header=pb.GradientHeader(
                    step=step,
                    manifest=to_proto(manifest),
                    coded=[
                        TensorSpec(name=tensor.name, shape=tensor.shape)
                        for tensor in freight.layout
                    ],
                )
            )
            offset = 0
            for bucket in range(transport.num_buckets):
                buffers = await transport.partials(step, bucket)
                for frame in iter_frames(iter_views(buffers), offset):
                    yield cast(pb.GetGradientsResponse, frame)  # as serve_get does it
                num_bytes = sum(buffer.nbytes for buffer in buffers)
                sent(Purpose.GRADIENTS).num_bytes += num_bytes
                offset += num_bytes
        except ExchangeError as error:
            raise ConflictError(str(error)) from error

    async def incoming(
        self,
        header: pb.ApplyGradientsHeader,
        rest: AsyncIterator[pb.ApplyGradientsRequest],
        wait_s: float,
    ) -> int:
        """Stage the sums of a step and commit them; return the number of steps applied.

        A step that was applied before is answered at once, since the caller has lost the answer.
        """
        transport = await self._at(header.fence.membership, wait_s)
        if header.step <= self._applied:
            return self._applied
        codecs = ("", transport.codec)
        manifest = from_proto(header.manifest, purpose=Purpose.GRADIENTS, codecs=codecs)
        try:
            inbox = (await transport.freight(header.step)).inbox
            expected_bytes = sum(tensor.nbytes for tensor in inbox)
            if manifest.total_bytes != expected_bytes:
                raise InvalidInputError.at(
                    "manifest.total_bytes",
                    f"{manifest.total_bytes}, but the sums have {expected_bytes}",
                )
            await _stage(transport, header.step, manifest, rest)
        except ExchangeError as error:
            raise ConflictError(str(error)) from error
        return await self._until_applied(header.fence.membership, header.step)

    async def _at(self, membership: int, wait_s: float) -> ServerTransport:
        """Wait until the session has joined the membership; return its transport."""
        try:
            async with asyncio.timeout(wait_s):
                while self._transport is None or self._membership < membership:
                    await self._changed.wait()
        except TimeoutError:
            text = f"the session has not joined membership {membership} within {wait_s:g} s"
            raise UnavailableError(text) from None
        if self._membership > membership:
            raise StaleError(f"the party is at membership {self._membership}, not {membership}")
        return self._transport

    async def _until_applied(self, membership: int, step: int) -> int:
        while self._applied < step:
            if self._transport is None or self._membership != membership:
                raise ConflictError(f"the party re-forms; step {step} will be done again")
            await self._changed.wait()
        return self._applied

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _stage(
    transport: ServerTransport,
    step: int,
    manifest: Manifest,
    requests: AsyncIterator[pb.ApplyGradientsRequest],
) -> None:
    """Pass a stream's chunks to the transport until its commit message; a stream without one
    changes nothing."""
    writer = ChunkWriter(
        manifest.total_bytes,
        lambda offset, data: transport.stage(step, offset, data),
        purpose=Purpose.GRADIENTS,
    )
    # The deadline is that of the exchange, as sums come as fast as the slowest member computes.
    await receive_chunks(requests, writer, transport.deadline_s)
    async with asyncio.timeout(transport.deadline_s):
        last = await anext(requests, None)
    if last is None or not last.commit:
        raise ConflictError("the stream ended without a commit")
    transport.commit(step)


def _manifest(entries: tuple[StreamVector, ...], codec: str) -> Manifest:
    named = [(_name(entry), entry.dtype, (entry.numel,)) for entry in entries]
    return build_manifest(named, Purpose.GRADIENTS, codec=codec)


def _name(entry: StreamVector) -> str:
    return f"{entry.bucket}/{entry.node.first}:{entry.node.stop}"
