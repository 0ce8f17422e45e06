"""A coordinator that does not lead lets nobody in, and callers find the one that does."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stratagem.client.sdk.client import AsyncClient
from stratagem.common.base.errors import StandbyError, UnavailableError
from stratagem.common.rpc.channel import Coordinators, open_channel, split_addresses
from stratagem.common.rpc.server import add_health, bind, make_server
from stratagem.coordinator.app.app import App
from stratagem.coordinator.runtime.leader_gate import LIVE, LeaderGate
from stratagem.coordinator.store.lead import Holder, Lease
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import coordinator_pb2_grpc
from tests.common.rpc.rig import rpc_errors
from tests.patience import PATIENCE_S
from tests.settings import coordinator_settings

LEADER = Holder("the first", "another host", 1, 1, "first.example:7070")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Counting(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers two calls, and counts them."""

    num_calls = 0

    async def ListWorkers(self, request: Any, context: Any) -> Any:
        self.num_calls += 1
        return pb.ListWorkersResponse()

    async def TailLogs(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.num_calls += 1
        yield pb.TailLogsResponse(text="a line")


@asynccontextmanager
async def serving() -> AsyncIterator[LeaderGate]:
    """A coordinator's server with its entrance, shut."""
    server = make_server()
    health = add_health(server)
    port = bind(server, "127.0.0.1", 0)
    entrance = LeaderGate(f"127.0.0.1:{port}", health)
    server.add_generic_rpc_handlers((entrance,))
    await entrance.shut("waits for the lead")
    await server.start()
    try:
        yield entrance
    finally:
        await server.stop(0)


async def health_of(entrance: LeaderGate, service: str = "") -> int:
    async with open_channel(entrance.address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)
        return int(answer.status)


async def until_health_is(wanted: int, entrance: LeaderGate) -> None:
    async with asyncio.timeout(PATIENCE_S), open_channel(entrance.address) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async for answer in watching:
            if answer.status == wanted:
                return


async def test_nobody_is_let_in_before_there_is_a_lead_and_all_learn_who_has_it() -> None:
    async with serving() as entrance, open_channel(entrance.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(StandbyError, match="waits for the lead"), rpc_errors():
            await stub.ListWorkers(pb.ListWorkersRequest())
        entrance.note_leader(Lease(LEADER, 1, 0, None))
        with pytest.raises(StandbyError, match="the first at first") as refused, rpc_errors():
            await stub.ListWorkers(pb.ListWorkersRequest())
        assert refused.value.leader == LEADER.address
        with pytest.raises(StandbyError), rpc_errors():
            _ = [line async for line in stub.TailLogs(pb.TailLogsRequest())]
        assert (await health_of(entrance), await health_of(entrance, LIVE)) == (
            NOT_SERVING,
            SERVING,
        )
        await entrance.open(Counting())
        assert await health_of(entrance) == SERVING
        assert [line.text async for line in stub.TailLogs(pb.TailLogsRequest())] == ["a line"]
        await entrance.shut("may no longer lead")
        with pytest.raises(StandbyError, match="may no longer lead"), rpc_errors():
            await stub.ListWorkers(pb.ListWorkersRequest())
        await entrance.open()
        await stub.ListWorkers(pb.ListWorkersRequest())


async def test_a_client_of_both_finds_the_leader_and_follows_the_lead() -> None:
    first, second = Counting(), Counting()
    async with serving() as one, serving() as other:
        await other.open(second)
        async with AsyncClient(f"{one.address}, {other.address}") as client:
            await client.workers()
            await other.shut("may no longer lead")
            waiting = asyncio.create_task(client.workers())
            await one.open(first)
            await waiting
        assert (first.num_calls, second.num_calls) == (1, 1)
        async with AsyncClient(other.address, patience_s=0) as client:
            with pytest.raises(StandbyError, match="may no longer lead"):
                await client.workers()


async def test_a_client_waits_for_a_coordinator_that_starts_but_not_for_a_standby(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stratagem.client.sdk.connection.STARTING_S", 2 * PATIENCE_S)
    async with serving() as entrance, AsyncClient(entrance.address) as client:
        refusal, is_refused = entrance.refusal, asyncio.Event()

        def refuse() -> StandbyError:
            is_refused.set()
            return refusal()

        monkeypatch.setattr(entrance, "refusal", refuse)
        asked = asyncio.create_task(client.workers())
        async with asyncio.timeout(PATIENCE_S):
            await is_refused.wait()
        await entrance.open(Counting())
        assert list(await asked) == []
        await entrance.shut("stands by")
        entrance.note_leader(Lease(LEADER, 1, 0, None))
        patient = AsyncClient(entrance.address, patience_s=2 * PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S), patient as other:
            with pytest.raises(StandbyError, match="the first at first"):
                await other.workers()


async def test_a_client_of_two_that_are_not_there_says_so() -> None:
    async with AsyncClient("127.0.0.1:1,127.0.0.1:2") as client:
        with pytest.raises(UnavailableError, match="no coordinator answers at 127"):
            await client.workers()


def test_channels_that_fail_together_move_on_once() -> None:
    coordinators = Coordinators(split_addresses("a:1, b:2,"))
    assert coordinators.addresses == ("a:1", "b:2")
    for _ in range(2):
        coordinators.move_on("a:1")
    assert coordinators.present == "b:2"
    coordinators.move_on("b:2")
    assert coordinators.present == "a:1"
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        split_addresses(" ,")


async def test_a_leader_that_cannot_reach_its_journal_answers_nobody(tmp_path: Path) -> None:
    settings = coordinator_settings(data_dir=tmp_path, lease_ttl_s=1.5)
    async with serving() as entrance, AsyncClient(entrance.address) as client:
        app = await App.lead(settings, entrance)
        running = asyncio.create_task(app.run())
        await entrance.open(Counting())
        await client.workers()
        with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await until_health_is(NOT_SERVING, entrance)
            other.execute("ROLLBACK")
            await until_health_is(SERVING, entrance)
        await client.workers()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await app.loop.close()
