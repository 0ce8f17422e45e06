"""One process that plays many workers, for benchmarks: they register, beat, and train nothing.

    python benchmarks/simulated_hosts.py COORDINATOR --workers 2500 --first 0

Each worker has its own address and its own connection to the coordinator, over which it beats as a
real one does (`--beats stream`), or by a call for each heartbeat, as workers of the version before
do (`--beats single`). They carry out what they are told: a segment takes half a second, says how
far it is ten times a second, and ends in a state of 64 KB; members of a party meet before.

Says on standard output, as a line of JSON, how long it took until all were registered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from stratagem.common.base.retry import Backoff
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.process.file_descriptors import raise_descriptor_limit
from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.server import bind, make_server
from stratagem.common.rpc.tensor_transfer import receive_header, receive_upload, serve_get
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose, build_manifest, from_proto
from stratagem.common.tensors.stream import ChunkWriter
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2, worker_pb2
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from stratagem.v1.worker_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)

INCARNATION = "simulated"
SINGLE_BEAT_S = 2.0
SEGMENT_S = 0.5
PROGRESS_PER_SEGMENT = 5
STATE_FLOATS = 16_000
ROWS = 40
ENDPOINT = bytes(200)
"""Of a member, at the rendezvous."""
PATIENCE_S = 300.0


class Simulated(WorkerServiceServicer):
    """All workers at once: who is asked does not matter, since nothing is held."""

    def __init__(self, stubs: Sequence[Any]) -> None:
        """stubs: of the coordinator, for members that meet; each has a connection of its own."""
        self._stubs = stubs
        values = np.zeros(STATE_FLOATS, np.float32)
        self._content = [values.data.cast("B")]
        named = [("weight", "float32", (STATE_FLOATS,))]
        self._manifest: Manifest = build_manifest(named, Purpose.STATE)

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(incarnation=INCARNATION)

    async def Execute(
        self, request: worker_pb2.ExecuteRequest, context: Any
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield worker_pb2.ExecuteResponse(accepted=worker_pb2.Accepted(incarnation=INCARNATION))
        if request.WhichOneof("plan") == "build":
            built = worker_pb2.BuildResult(
                num_rows={"train": ROWS}, num_parameters=STATE_FLOATS, layout_digest="x"
            )
            result = worker_pb2.ExecuteResult(build=built)
        else:
            to_step = request.train.to_step
            members = request.train.view.members
            if len(members) > 1:
                await self._meet(request)
            for _ in range(PROGRESS_PER_SEGMENT):
                await asyncio.sleep(SEGMENT_S / PROGRESS_PER_SEGMENT)
                shown = worker_pb2.Progress(step=to_step, to_step=to_step, loss=0.5, engine="solo")
                yield worker_pb2.ExecuteResponse(progress=shown)
            trained = worker_pb2.TrainResult(
                step=to_step, loss=0.5, num_rows=ROWS, seconds=SEGMENT_S, engine="solo"
            )
            result = worker_pb2.ExecuteResult(train=trained)
        yield worker_pb2.ExecuteResponse(result=result)

    async def GetState(
        self, request: worker_pb2.GetStateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GetStateResponse]:
        responses = serve_get(
            worker_pb2.GetStateResponse, self._manifest, self._content, request.offset
        )
        async for response in responses:
            yield response

    async def SetState(
        self, request_iterator: AsyncIterator[worker_pb2.SetStateRequest], context: Any
    ) -> AsyncIterator[worker_pb2.SetStateResponse]:
        header = (await receive_header(request_iterator)).header
        manifest = from_proto(header.manifest, Limits())
        writer = ChunkWriter(manifest.total_bytes, lambda _offset, _data: None)

        async def commit() -> None:
            """Nothing is kept."""

        async for response in receive_upload(
            request_iterator, worker_pb2.SetStateResponse, writer, commit
        ):
            yield response

    async def Abort(self, request: Any, context: Any) -> worker_pb2.AbortResponse:
        return worker_pb2.AbortResponse()

    async def CloseSession(self, request: Any, context: Any) -> worker_pb2.CloseSessionResponse:
        return worker_pb2.CloseSessionResponse()

    async def _meet(self, request: worker_pb2.ExecuteRequest) -> None:
        told = request.train.view
        await self._stubs[told.rank % len(self._stubs)].Rendezvous(
            pb.RendezvousRequest(
                fence=request.fence,
                session=request.session,
                rank=told.rank,
                endpoint=ENDPOINT,
                address="127.0.0.1:1",
            )
        )


def name_of(n: int) -> str:
    """Return the name of the n-th worker of all hosts."""
    return f"w{n:05}"


class Host:
    """Workers first, first + 1, ... of this process."""

    def __init__(self, coordinator: str, first: int, num_workers: int, together: int) -> None:
        """together: how many register at once."""
        self._together = asyncio.Semaphore(together)
        self._numbers = range(first, first + num_workers)
        self._stubs = [
            CoordinatorServiceStub(open_channel(coordinator, own_connection=True))
            for _ in self._numbers
        ]
        self._ports: list[int] = []
        self._addresses = [f"127.1.{n // 250}.{n % 250 + 1}" for n in self._numbers]

    async def serve(self) -> grpc.aio.Server:
        """Serve all workers, each at an address of its own."""
        server = make_server()
        add_WorkerServiceServicer_to_server(Simulated(self._stubs), server)
        self._ports = [bind(server, address, 0) for address in self._addresses]
        await server.start()
        return server

    async def register(self, at: int) -> None:
        """Register one worker, as often as it takes, with the pauses that real ones make."""
        request = pb.RegisterWorkerRequest(
            worker_id=name_of(self._numbers[at]),
            incarnation=INCARNATION,
            address=f"{self._addresses[at]}:{self._ports[at]}",
            capability=types_pb2.Capability(
                device="cpu", numerics_fingerprint="same", numerics_rules=CURRENT
            ),
        )
        backoff, timeout_s = Backoff(0.1, 5.0), 10.0
        async with self._together, asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await self._stubs[at].RegisterWorker(request, timeout=timeout_s)
                    return
                await backoff.pause()
                timeout_s = min(2 * timeout_s, 60.0)

    async def beat_singly(self, at: int) -> None:
        """Beat by one call after the other, for ever."""
        request = pb.HeartbeatRequest(worker_id=name_of(self._numbers[at]), incarnation=INCARNATION)
        await asyncio.sleep(random.uniform(0, SINGLE_BEAT_S))
        while True:
            await self._stubs[at].Heartbeat(request, timeout=60)
            await asyncio.sleep(SINGLE_BEAT_S)

    async def beat(self, at: int) -> None:
        """Beat over standing calls, for ever, as often as the coordinator asks for."""
        first = pb.HeartbeatStreamRequest(
            worker_id=name_of(self._numbers[at]), incarnation=INCARNATION
        )
        next_one, interval_s = pb.HeartbeatStreamRequest(), SINGLE_BEAT_S
        while True:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                call: Any = self._stubs[at].HeartbeatStream()
                await call.write(first)
                is_first = True
                while (answer := await call.read()) is not grpc.aio.EOF:
                    interval_s = answer.interval_s
                    pause_s = random.uniform(0, interval_s) if is_first else interval_s
                    is_first = False
                    await asyncio.sleep(pause_s)
                    await call.write(next_one)
            await asyncio.sleep(random.uniform(0, interval_s))

    async def run(self, beats: str) -> None:
        """Register all workers, say how long it took, and beat for ever."""
        server = await self.serve()
        all_of_them, began_s = range(len(self._numbers)), time.monotonic()
        beat = self.beat if beats == "stream" else self.beat_singly

        async def live(at: int) -> None:
            await self.register(at)
            registered.append(at)
            if len(registered) == len(self._numbers):
                print(json.dumps(time.monotonic() - began_s), flush=True)
            await beat(at)

        registered: list[int] = []
        await asyncio.gather(server.wait_for_termination(), *map(live, all_of_them))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("coordinator")
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first worker")
    parser.add_argument("--together", type=int, help="how many register at once; unless set, all")
    parser.add_argument("--beats", choices=("stream", "single"), default="stream")
    args = parser.parse_args()
    raise_descriptor_limit()
    asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> None:
    host = Host(args.coordinator, args.first, args.workers, args.together or args.workers)
    await host.run(args.beats)


if __name__ == "__main__":
    main()
