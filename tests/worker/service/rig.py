"""A coordinator that does what it is told, and real worker processes that talk to it."""

import asyncio
import contextlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from stratagem.common.process import template
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.server import bind, make_server
from stratagem.v1 import coordinator_pb2 as cpb
from stratagem.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from stratagem.v1.worker_pb2_grpc import WorkerServiceStub
from tests.jobs import ALLOW
from tests.patience import PATIENCE_S
from tests.repository import ROOT


@dataclass
class Barrier:
    arrivals: dict[int, cpb.RendezvousRequest] = field(default_factory=dict)
    full: asyncio.Event = field(default_factory=asyncio.Event)


class FakeCoordinator(CoordinatorServiceServicer):
    """Minimal: every membership has as many members as `sizes` says."""

    def __init__(self) -> None:
        self.registered: dict[str, cpb.RegisterWorkerRequest] = {}
        self.num_registered: dict[str, int] = defaultdict(int)
        self.heartbeats: list[cpb.HeartbeatStreamRequest] = []
        self.suspects: list[cpb.SuspectRequest] = []
        self.left: list[cpb.LeaveRequest] = []
        self.forgotten: set[str] = set()
        self.sizes: dict[tuple[str, int], int] = {}
        self.barriers: dict[tuple[str, int], Barrier] = defaultdict(Barrier)
        self.changed = asyncio.Condition()

    async def wait(self, condition: Any) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(condition)

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def RegisterWorker(self, request: Any, context: Any) -> cpb.RegisterWorkerResponse:
        self.registered[request.worker_id] = request
        self.num_registered[request.worker_id] += 1
        self.forgotten.discard(request.worker_id)
        await self._note()
        return cpb.RegisterWorkerResponse(term=1, heartbeat_interval_s=0.05, lease_ttl_s=5.0)

    async def HeartbeatStream(
        self, requests: Any, context: Any
    ) -> AsyncIterator[cpb.HeartbeatStreamResponse]:
        worker_id, num_beats = "", 0
        async for request in requests:
            worker_id, num_beats = worker_id or request.worker_id, num_beats + 1
            self.heartbeats.append(request)
            await self._note()
            if worker_id in self.forgotten:
                await context.abort(grpc.StatusCode.NOT_FOUND, "who are you")
            yield cpb.HeartbeatStreamResponse(term=1, num_beats=num_beats, interval_s=0.05)

    async def Leave(self, request: Any, context: Any) -> cpb.LeaveResponse:
        self.left.append(request)
        return cpb.LeaveResponse()

    async def Rendezvous(self, request: Any, context: Any) -> cpb.RendezvousResponse:
        key = (request.session.run_id, request.fence.membership)
        if key not in self.sizes:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "stale membership")
        barrier = self.barriers[key]
        barrier.arrivals[request.rank] = request
        await self._note()
        if len(barrier.arrivals) == self.sizes[key]:
            barrier.full.set()
        await barrier.full.wait()
        return cpb.RendezvousResponse(
            members=[
                cpb.RendezvousMember(
                    endpoint=each.endpoint,
                    address=each.address,
                    applied_step=each.applied_step if each.HasField("applied_step") else None,
                    slices=each.slices if each.HasField("slices") else None,
                )
                for _, each in sorted(barrier.arrivals.items())
            ]
        )

    async def Suspect(self, request: Any, context: Any) -> cpb.SuspectResponse:
        self.suspects.append(request)
        await self._note()
        return cpb.SuspectResponse()


@dataclass
class Worker:
    name: str
    process: template.Process
    address: str
    incarnation: str
    ready: Mapping[str, Any]
    channel: grpc.aio.Channel
    stub: Any

    async def stop(self) -> None:
        await self.channel.close()
        self.process.kill()
        await self.wait()

    async def wait(self) -> int:
        """The exit status, at the end of the process."""
        return await asyncio.to_thread(self.process.wait)


@dataclass
class Rig:
    coordinator: FakeCoordinator
    address: str
    directory: Path
    workers: list[Worker] = field(default_factory=list)

    async def start(self, name: str, *flags: str, **variables: str) -> Worker:
        ready = self.directory / f"{name}.ready"
        ready.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "stratagem.worker", "--coordinator", self.address),
            *("--name", name, "--threads", "1", "--ready-file", str(ready)),
            *("--allow", ALLOW, "--import-path", str(ROOT)),
            *flags,
        ]
        with (self.directory / f"{name}.log").open("ab") as log:
            environment = {**os.environ, **variables}
            process = template.start(command, environment, log, with_input=False)
        count = self.coordinator.num_registered[name]
        await self.coordinator.wait(lambda: self.coordinator.num_registered[name] > count)
        async with asyncio.timeout(PATIENCE_S):
            while not ready.exists():  # noqa: ASYNC110  (a file has no event)
                await asyncio.sleep(0.01)
        facts = json.loads(ready.read_text())
        channel = open_channel(facts["address"])
        worker = Worker(
            name=name,
            process=process,
            address=facts["address"],
            incarnation=facts["incarnation"],
            ready=facts,
            channel=channel,
            stub=WorkerServiceStub(channel),
        )
        self.workers.append(worker)
        return worker


@contextlib.asynccontextmanager
async def open_rig(directory: Path) -> AsyncIterator[Rig]:
    server = make_server()
    coordinator = FakeCoordinator()
    add_CoordinatorServiceServicer_to_server(coordinator, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    rig = Rig(coordinator, f"127.0.0.1:{port}", directory)
    try:
        yield rig
    finally:
        for worker in rig.workers:
            await worker.stop()
        await server.stop(None)
