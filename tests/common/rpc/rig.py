"""A worker service that only stores and gives tensors, on a real server, behind a wire that a
test can cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc.aio

from stratagem.common.base.errors import IntegrityError, UnavailableError
from stratagem.common.rpc.server import bind, make_server
from stratagem.common.rpc.status_codes import from_rpc_error
from stratagem.common.rpc.tensor_transfer import receive_header, receive_upload, serve_get
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.local_files import MemoryCopy, is_near, serve_copy
from stratagem.common.tensors.manifest import Manifest, from_proto
from stratagem.common.tensors.stream import ChunkWriter, into
from stratagem.v1 import worker_pb2, worker_pb2_grpc


@contextmanager
def rpc_errors() -> Iterator[None]:
    """Turn the RPC errors of the calls inside into errors of our tree."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


class Store(worker_pb2_grpc.WorkerServiceServicer):
    """GetState gives `manifest` and `buffers`; SetState fills `partial` and then `committed`."""

    def __init__(self, idle_timeout_s: float = 30.0) -> None:
        self.manifest: Manifest | None = None
        self.buffers: list[memoryview] = []
        self.partial = bytearray()
        self.received = 0
        self.committed: dict[str, bytes] = {}
        self.offsets: list[int] = []
        self.cut_after: list[int] = []
        """For each call to come: raise UNAVAILABLE after so many messages."""
        self.tamper: Callable[[Any], None] = lambda _message: None
        self.idle_timeout_s = idle_timeout_s
        self.silent = asyncio.Event()
        self.silence_after = -1
        self.makes_copies = True

    async def GetState(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.offsets.append(request.offset)
        if is_near(request.place) and self.makes_copies:
            assert self.manifest is not None
            num_bytes, copy = sum(each.nbytes for each in self.buffers), MemoryCopy(self.buffers)
            first = worker_pb2.GetStateResponse
            async for message in serve_copy(
                first, self.manifest, copy, num_bytes, self.idle_timeout_s
            ):
                self.tamper(message)
                yield message
            return
        budget = self.cut_after.pop(0) if self.cut_after else -1
        assert self.manifest is not None
        async for message in serve_get(
            worker_pb2.GetStateResponse, self.manifest, self.buffers, request.offset
        ):
            if budget == 0:
                raise UnavailableError("cut by the test")
            if self.silence_after == 0:
                self.silence_after = -1
                await self.silent.wait()
            budget, self.silence_after = budget - 1, self.silence_after - 1
            if isinstance(message, bytes):
                message = worker_pb2.GetStateResponse.FromString(message)
            self.tamper(message)
            yield message

    async def SetState(
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        header = (await receive_header(request_iterator, self.idle_timeout_s)).header
        manifest = from_proto(header.manifest)
        if len(self.partial) != manifest.total_bytes:
            self.partial, self.received = bytearray(manifest.total_bytes), 0
        target = into(memoryview(self.partial))
        budget = self.cut_after.pop(0) if self.cut_after else -1
        self.offsets.append(self.received)

        def sink(offset: int, data: bytes) -> None:
            nonlocal budget
            if budget == 0:
                raise UnavailableError("cut by the test")
            budget -= 1
            target(offset, data)
            self.received = offset + len(data)

        async def commit() -> None:
            digest = blob_digest(manifest, [bytes(self.partial)])
            if digest != header.digest:
                self.received = 0
                raise IntegrityError(f"digest is {digest}, announced {header.digest}")
            self.committed[digest] = bytes(self.partial)

        writer = ChunkWriter(manifest.total_bytes, sink, self.received)
        async for response in receive_upload(
            request_iterator, worker_pb2.SetStateResponse, writer, commit, self.idle_timeout_s
        ):
            yield response


@asynccontextmanager
async def serving(store: Any) -> AsyncIterator[int]:
    """The service on a free port."""
    server = make_server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(store, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


class Wire:
    """A TCP relay to a server that drops each connection after its share of `budgets` bytes."""

    def __init__(self, port: int, budgets: list[int]) -> None:
        self._port, self.budgets, self.num_connections = port, budgets, 0

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        budget = [self.budgets.pop(0) if self.budgets else 2**62]
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ends = [
            asyncio.create_task(self._copy(reader, far_writer, budget)),
            asyncio.create_task(self._copy(far_reader, writer, budget)),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            for each in (writer, far_writer):
                each.transport.abort()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: list[int]
    ) -> None:
        while budget[0] > 0 and (data := await reader.read(2**16)):
            budget[0] -= len(data)
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def fragile_wire(port: int, budgets: list[int]) -> AsyncIterator[tuple[Wire, int]]:
    """A wire to `port`, and the port to dial instead."""
    wire = Wire(port, budgets)
    server = await asyncio.start_server(wire.relay, "127.0.0.1", 0)
    try:
        yield wire, server.sockets[0].getsockname()[1]
    finally:
        server.close()


def stub_of(channel: grpc.aio.Channel) -> Any:
    return worker_pb2_grpc.WorkerServiceStub(channel)
