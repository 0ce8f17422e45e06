"""The port of health is open to whoever reaches it, and answers whoever asks once."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stratagem.common.rpc import server as rpc_server
from stratagem.common.rpc.admission import DEFAULT_LIMITS
from stratagem.common.rpc.channel import SERVER_OPTIONS
from stratagem.common.rpc.health_service import MAX_WATCHERS, HealthService
from stratagem.common.rpc.server import add_health, bind, make_health_server
from tests.patience import PATIENCE_S

ASK = health_pb2.HealthCheckRequest()
STREAMS_OF_A_CONNECTION = MAX_WATCHERS
Code = grpc.StatusCode


class Probes:
    """A port of health, and connections to it."""

    def __init__(self, open_: AsyncExitStack) -> None:
        self._open, self._num_connections = open_, 0
        self.server = make_health_server()
        self.service: HealthService = add_health(self.server)
        self.port = bind(self.server, "127.0.0.1", 0)

    async def connect(self) -> Any:
        return health_pb2_grpc.HealthStub(await self.open())

    async def open(self) -> grpc.aio.Channel:
        """Over a connection of its own."""
        self._num_connections += 1
        options = [("grpc.use_local_subchannel_pool", 1), ("test.number", self._num_connections)]
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=options)
        return await self._open.enter_async_context(channel)


async def probes(open_: AsyncExitStack) -> Probes:
    made = Probes(open_)
    await made.server.start()
    open_.push_async_callback(made.server.stop, None)
    return made


@pytest.fixture
def num_connections(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many hold more calls together than a server has for those that it counts."""
    options = {**dict(SERVER_OPTIONS), "grpc.max_concurrent_streams": STREAMS_OF_A_CONNECTION}
    monkeypatch.setattr(rpc_server, "SERVER_OPTIONS", tuple(options.items()))
    few = replace(DEFAULT_LIMITS, max_calls=2 * STREAMS_OF_A_CONNECTION)
    monkeypatch.setattr(rpc_server, "DEFAULT_LIMITS", few)
    return 3


async def test_who_asks_once_is_answered_however_many_watch(num_connections: int) -> None:
    async with AsyncExitStack() as open_:
        asked = await probes(open_)
        watching: list[Any] = []
        kept: list[Any] = []
        refused: list[grpc.aio.AioRpcError] = []
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(num_connections):
                stub = await asked.connect()
                for _ in range(STREAMS_OF_A_CONNECTION):
                    watching.append(stub.Watch(ASK))
                    try:
                        await watching[-1].read()
                        kept.append(watching[-1])
                    except grpc.aio.AioRpcError as error:
                        refused.append(error)
            assert len(kept) == MAX_WATCHERS
            assert {each.code() for each in refused} == {Code.RESOURCE_EXHAUSTED}
            assert refused[0].details() == (
                f"{MAX_WATCHERS} callers watch, the limit is {MAX_WATCHERS}; use Check"
            )
            checked = await (await asked.connect()).Check(ASK)
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
            # Whoever watches is told, and one that leaves takes nobody with it.
            kept[0].cancel()
            await asked.service.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            told = await asyncio.gather(*(each.read() for each in kept[1:]))
        assert {each.status for each in told} == {health_pb2.HealthCheckResponse.NOT_SERVING}


async def test_calls_without_a_request_keep_nobody_out(num_connections: int) -> None:
    async with AsyncExitStack() as open_:
        asked = await probes(open_)
        silent: list[Any] = []
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(num_connections):
                say: Any = (await asked.open()).stream_unary("/grpc.health.v1.Health/Check")
                silent += [say() for _ in range(STREAMS_OF_A_CONNECTION)]
                await silent[-1].wait_for_connection()
                checked = await (await asked.connect()).Check(ASK)
                assert checked.status == health_pb2.HealthCheckResponse.SERVING
        for call in silent:
            call.cancel()


async def test_the_end_of_a_process_is_said_for_good() -> None:
    async with AsyncExitStack() as open_:
        asked = await probes(open_)
        stub = await asked.connect()
        watch = stub.Watch(ASK)
        async with asyncio.timeout(PATIENCE_S):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            await asked.service.enter_graceful_shutdown()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await asked.service.set("", health_pb2.HealthCheckResponse.SERVING)
            assert (await stub.Check(ASK)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Check(health_pb2.HealthCheckRequest(service="unheard of"))
        assert refused.value.code() is Code.NOT_FOUND
