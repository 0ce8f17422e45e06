"""A caller that stops reading is given up; one that is slow, or waits for news, is not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from stratagem.common.base.errors import UnavailableError
from stratagem.common.rpc.admission import CallLimits
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.server import bind, make_server
from stratagem.common.rpc.streams import StallTimeout, takes_nothing
from stratagem.common.rpc.tensor_transfer import pull, serve_get
from stratagem.common.tensors.manifest import Purpose, build_manifest
from stratagem.v1 import worker_pb2, worker_pb2_grpc
from tests.patience import PATIENCE_S

SIZE = 64 * 2**20
"""More than gRPC keeps for a reader that does not read."""


class Holder(worker_pb2_grpc.WorkerServiceServicer):
    """Gives a large state, and says when a call for it has ended."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def GetState(self, request: Any, context: Any) -> AsyncIterator[Any]:
        manifest = build_manifest([("x", "uint8", (SIZE,))], Purpose.STATE)
        content = [memoryview(bytes(SIZE))]
        responses = serve_get(worker_pb2.GetStateResponse, manifest, content, request.offset)
        try:
            async with aclosing(responses) as messages:  # type: ignore[type-var]
                async for message in messages:
                    yield message
        finally:
            self.ended.set()


async def test_a_stalled_download_ends_and_goes_on_where_it_stood() -> None:
    holder, server = Holder(), make_server(CallLimits(idle_timeout_s=0.2))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(holder, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with asyncio.timeout(PATIENCE_S), open_channel(f"127.0.0.1:{port}") as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            stalled = stub.GetState(worker_pb2.GetStateRequest())
            await stalled.read()
            await holder.ended.wait()  # nothing has told it but the time that nobody has read
            received = bytearray(SIZE)
            offsets: list[int] = []

            def call(offset: int) -> Any:
                offsets.append(offset)
                return stub.GetState(worker_pb2.GetStateRequest(offset=offset))

            holder.ended.clear()
            first = True

            async def keep_up() -> None:
                nonlocal first
                if first:
                    first = False
                    await holder.ended.wait()  # such as a disk that stands still

            await pull(call, lambda _: memoryview(received), keep_up=keep_up)
            # More than two on a machine that stands still for longer than the limit.
            assert len(offsets) >= 2
            assert offsets[0] == 0 < offsets[1]
            assert offsets == sorted(offsets)
            stalled.cancel()
    finally:
        await server.stop(None)


class Caller:
    """Takes what it is given, until it is held."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def take(self, response: int) -> None:
        await self.is_free.wait()
        self.taken.append(response)


async def give(caller: Caller, responses: list[int]) -> None:
    async with StallTimeout(0.02, takes_nothing) as stall:
        for response in responses:
            with stall.waiting():
                await caller.take(response)
            await asyncio.sleep(0.2)  # the handler has nothing to say for a while


async def test_the_deadline_is_on_what_is_not_taken() -> None:
    caller = Caller()
    await give(caller, [1, 2])
    caller.is_free.clear()
    with pytest.raises(UnavailableError, match=r"has taken nothing for 0\.02 s; ask again"):
        await give(caller, [3])
    assert caller.taken == [1, 2]


async def test_who_waits_for_others_is_not_hurried() -> None:
    caller = Caller()
    caller.is_free.clear()
    async with asyncio.TaskGroup() as group, StallTimeout(None) as stall:
        with stall.waiting():
            writing = group.create_task(caller.take(1))
            await asyncio.sleep(0.05)
            assert not writing.done()
            caller.is_free.set()
            await writing
    assert caller.taken == [1]
