"""A served coordinator, and a worker that only says who it is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.server import bind, make_server
from stratagem.coordinator.app.app import App
from stratagem.coordinator.observe.troubles import Refusals
from stratagem.coordinator.service.service import CoordinatorServicer
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import coordinator_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.coordinator.core.jobs import LOCAL, job_text
from tests.coordinator.open_gate import entrance
from tests.patience import PATIENCE_S
from tests.settings import coordinator_settings


class Acquaintance(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that answers Describe and nothing else."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(incarnation=self._incarnation)


@asynccontextmanager
async def worker(incarnation: str) -> AsyncIterator[str]:
    server = make_server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Acquaintance(incarnation), server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[tuple[App, str]]:
    """A coordinator, and where it listens; workers that do not beat stay for as long as a test."""
    made = coordinator_settings(data_dir=folder, **{"worker_ttl_s": PATIENCE_S, **settings})
    refusals = Refusals()
    app = await App.lead(made, entrance(), refusals)
    server = make_server(on_refusal={"RegisterWorker": refusals.note})
    servicer = CoordinatorServicer(app)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    running = asyncio.create_task(app.run())
    await server.start()
    try:
        yield app, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await app.loop.close()


@asynccontextmanager
async def coordinator(folder: Path, **settings: Any) -> AsyncIterator[Any]:
    async with served(folder, **settings) as (_, address):
        channel = open_channel(address)
        try:
            yield coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        finally:
            await channel.close()


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def first_of(stream: Any) -> Any:
    return await anext(aiter(stream))


def submit(run_id: str = "r-1", **changes: Any) -> pb.SubmitRunRequest:
    return pb.SubmitRunRequest(run_id=run_id, job_json=job_text(LOCAL, **changes))
