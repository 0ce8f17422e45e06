"""What a coordinator keeps of tunnelled workers that die, that come back, and that are replaced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.ids import Incarnation, WorkerId
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.rpc.channel import PLAINTEXT, Coordinators, open_channel
from stratagem.common.rpc.server import bind_socket, make_server
from stratagem.common.rpc.streams import SocketFolder
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.commands import Command, LeaveWorker, LoseWorker, RegisterWorker
from stratagem.coordinator.core.facts import Capability, Member
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2, worker_pb2_grpc
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from stratagem.worker.process.tunnel import Tunnel
from tests.coordinator.runtime.streams import Stream
from tests.coordinator.service.serving import Acquaintance, served
from tests.patience import PATIENCE_S

W = Member(worker_id=WorkerId("w"), incarnation=Incarnation("one"))
AGAIN = Member(worker_id=WorkerId("w"), incarnation=Incarnation("two"))
LOST = LoseWorker(W, "it does not beat")


def registered(member: Member) -> RegisterWorker:
    return RegisterWorker(member, "", Capability(tunnelled=True))


def socket_of(app: App, member: Member) -> Path:
    return Path(app.relay.target(member).removeprefix("unix:"))


@pytest.mark.parametrize("end", [LOST, LeaveWorker(W, "it ends"), registered(AGAIN)])
async def test_nothing_is_left_of_a_worker_whose_streams_have_ended_before(
    tmp_path: Path, end: Command
) -> None:
    """It was never dialled, so that no link to it tells the relay that it is gone."""
    async with served(tmp_path) as (app, _):
        stream = await Stream(app.relay, W).parked()
        await app.loop.submit(registered(W))
        path = socket_of(app, W)
        await stream.sent.put(None)
        await stream.ended()
        assert path.exists(), "a worker that is registered may park another stream"
        await app.loop.submit(end)
        assert not path.exists()


async def test_a_stream_that_outlives_its_worker_ends_by_itself_with_the_socket(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as (app, _):
        stream = await Stream(app.relay, W).parked()
        await app.loop.submit(registered(W))
        await app.loop.submit(LOST)
        path = socket_of(app, W)
        assert not stream.is_over
        await stream.sent.put(None)
        await stream.ended()
        assert not path.exists()


@asynccontextmanager
async def tunnel(address: str, server_path: str) -> AsyncIterator[None]:
    made = Tunnel(Coordinators((address,)), W.worker_id, W.incarnation, server_path, PLAINTEXT)
    running = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await made.is_parked.wait()
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def worker_at_a_socket() -> AsyncIterator[str]:
    folder, server = SocketFolder(), make_server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Acquaintance(W.incarnation), server)
    path = folder.path("worker.sock")
    bind_socket(server, path, None)
    await server.start()
    try:
        yield path
    finally:
        await server.stop(0)
        folder.close()


async def register(stub: Any) -> None:
    capability = types_pb2.Capability(
        device="cpu", num_threads=1, numerics_rules=CURRENT, tunnelled=True
    )
    request = pb.RegisterWorkerRequest(
        worker_id=W.worker_id, incarnation=W.incarnation, capability=capability
    )
    await stub.RegisterWorker(request)


async def answers(app: App) -> bool:
    return await app.links.to(W, app.loop.state).answers(timeout_s=PATIENCE_S)


async def test_a_worker_that_was_lost_is_reached_again_once_it_registers(tmp_path: Path) -> None:
    """With the streams that it has kept open all the time, and with new ones."""
    async with (
        served(tmp_path) as (app, address),
        worker_at_a_socket() as server_path,
        open_channel(address) as channel,
    ):
        stub = CoordinatorServiceStub(channel)
        async with tunnel(address, server_path):
            for _ in range(2):
                await register(stub)
                assert await answers(app)
                await app.loop.submit(LOST)
        async with tunnel(address, server_path):
            await register(stub)
            assert await answers(app)
