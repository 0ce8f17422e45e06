"""What many workers and many runs cost the coordinator: CPU, latency, and whether it stays linear.

    python benchmarks/load.py --seconds 8
    python benchmarks/load.py --workers 1000 --runs 50

The coordinator is the real one, in a process of its own. The workers are simulated in another one:
each has its own address and connection, registers, beats every two seconds through the real calls,
and carries out what it is told without training: a segment takes half a second, says how far it is
ten times a second, and ends in a state of 64 KB. A third process asks for the latencies. A
heartbeat does nothing but renew a lease, so how long it takes is how late the event loop is.

First rows: workers without runs. Then runs, each on a worker of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from stratagem.common.rpc.channel import open_channel  # noqa: E402
from stratagem.common.rpc.server import bind, make_server  # noqa: E402
from stratagem.common.rpc.tensor_transfer import receive_header, receive_upload, serve_get  # noqa: E402
from stratagem.common.tensors.chunks import ChunkWriter  # noqa: E402
from stratagem.common.tensors.manifest import Limits, Manifest, Purpose, build_manifest, from_proto  # noqa: E402
from stratagem.v1 import coordinator_pb2 as pb  # noqa: E402
from stratagem.v1 import types_pb2, worker_pb2  # noqa: E402
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub  # noqa: E402
from stratagem.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server  # noqa: E402
from tests.free_ports import free_port  # noqa: E402

INCARNATION = "simulated"
BEAT_S = 2.0
SEGMENT_S = 0.5
PROGRESS_PER_SEGMENT = 5
STATE_FLOATS = 16_000
ROWS = 40
CALLS_PER_S = 50
JOB: dict[str, Any] = {
    "name": "load",
    "model": {"entrypoint": "nowhere:model"},
    "data": {"entrypoint": "nowhere:data"},
    "loss": "mse",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "batch_size": 10,
    "epochs": 100_000,  # each is a segment; the benchmark ends before the run does
    "strategy": {"type": "Local"},
}


# ---- the simulated workers ----


class Simulated(WorkerServiceServicer):
    """All workers at once: who is asked does not matter, since nothing is held."""

    def __init__(self) -> None:
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


async def simulate(coordinator: str, num_workers: int) -> None:
    """Serve, register and beat; says on standard output how long registering took."""
    server = make_server()
    add_WorkerServiceServicer_to_server(Simulated(), server)
    addresses = [f"127.1.{n // 250}.{n % 250 + 1}" for n in range(num_workers)]
    ports = [bind(server, address, 0) for address in addresses]
    await server.start()
    channels = [open_channel(coordinator, own_connection=True) for _ in addresses]
    stubs = [CoordinatorServiceStub(channel) for channel in channels]
    began_s = time.monotonic()
    joining = asyncio.Semaphore(32)

    async def register(n: int) -> None:
        request = pb.RegisterWorkerRequest(
            worker_id=f"w{n:04}",
            incarnation=INCARNATION,
            address=f"{addresses[n]}:{ports[n]}",
            capability=types_pb2.Capability(device="cpu", numerics_fingerprint="same"),
        )
        async with joining:
            await stubs[n].RegisterWorker(request, timeout=60)

    await asyncio.gather(*(register(n) for n in range(num_workers)))
    print(json.dumps(time.monotonic() - began_s), flush=True)

    async def beat(n: int) -> None:
        await asyncio.sleep(BEAT_S * n / num_workers)
        request = pb.HeartbeatRequest(worker_id=f"w{n:04}", incarnation=INCARNATION)
        while True:
            await stubs[n].Heartbeat(request, timeout=10)
            await asyncio.sleep(BEAT_S)

    await asyncio.gather(*(beat(n) for n in range(num_workers)))


# ---- measuring ----


@dataclass(frozen=True, slots=True)
class Row:
    workers: int
    runs: int
    register_ms: float
    """Per worker, 32 at once."""
    cpu: float
    """Of one core."""
    memory_mb: float
    commits_per_s: float
    heartbeat_ms: tuple[float, float]
    """p50 and p99."""
    status_ms: tuple[float, float]
    list_runs_ms: float
    list_workers_ms: float

    @property
    def cpu_ms_per_commit(self) -> float:
        return 1000 * self.cpu / self.commits_per_s if self.commits_per_s else 0.0

    def cells(self) -> list[str]:
        per_commit = f"{self.cpu_ms_per_commit:.1f}" if self.runs else ""
        pairs = [f"{a:.1f} / {b:.1f}" for a, b in (self.heartbeat_ms, self.status_ms)]
        return [
            f"{self.workers}",
            f"{self.runs}",
            f"{self.register_ms:.1f}",
            f"{100 * self.cpu:.0f}",
            f"{1e5 * self.cpu / self.workers:.0f}" if not self.runs else per_commit,
            f"{self.commits_per_s:.1f}",
            *pairs,
            f"{self.list_runs_ms:.1f}",
            f"{self.list_workers_ms:.1f}",
            f"{self.memory_mb:.0f}",
        ]


HEAD = [
    "workers",
    "runs",
    "register ms",
    "CPU %",
    "CPU: us/s per worker, or ms per commit",
    "commits/s",
    "heartbeat ms p50 / p99",
    "status ms p50 / p99",
    "list runs ms",
    "list workers ms",
    "MB",
]


def measure(num_workers: int, num_runs: int, seconds: float) -> Row:
    """One coordinator with that many workers and runs, for some seconds after a warm-up."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = f"127.0.0.1:{free_port()}"
        flags = ["--listen", address, "--data-dir", str(folder / "data")]
        coordinator = subprocess.Popen(
            [sys.executable, "-m", "stratagem.coordinator", *flags], stderr=subprocess.PIPE
        )
        stack.callback(_end, coordinator)
        _wait_until_it_serves(coordinator)
        simulated = subprocess.Popen(
            [sys.executable, __file__, "--simulate", address, str(num_workers)],
            stdout=subprocess.PIPE,
        )
        stack.callback(_end, simulated)
        assert simulated.stdout is not None
        register_s = float(json.loads(simulated.stdout.readline()))
        return asyncio.run(
            _ask(address, coordinator.pid, num_workers, num_runs, seconds, register_s)
        )


def _wait_until_it_serves(coordinator: subprocess.Popen[bytes]) -> None:
    """Read the log of a coordinator until it says so; what follows is read for nobody."""
    log, said = coordinator.stderr, b""
    assert log is not None
    while b"coordinator serves" not in said:
        line = log.readline()
        assert line, said.decode()
        said += line
    threading.Thread(target=lambda: collections.deque(log, maxlen=0), daemon=True).start()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


async def _ask(
    address: str, pid: int, num_workers: int, num_runs: int, seconds: float, register_s: float
) -> Row:
    async with open_channel(address) as channel:
        stub = CoordinatorServiceStub(channel)
        for n in range(num_runs):
            request = pb.SubmitRunRequest(run_id=f"r{n}", job_json=json.dumps(JOB))
            await stub.SubmitRun(request)
        await asyncio.sleep(2 + 0.02 * num_runs)
        commits, cpu_s, began_s = await _commits(stub), _cpu_s(pid), time.monotonic()
        beats, states = await asyncio.gather(
            _latencies(lambda: stub.Heartbeat(_BEAT), seconds),
            _latencies(lambda: stub.GetRun(pb.GetRunRequest(run_id="r0")), seconds)
            if num_runs
            else _latencies(lambda: stub.ListRuns(pb.ListRunsRequest()), seconds),
        )
        took_s = time.monotonic() - began_s
        cpu_s = _cpu_s(pid) - cpu_s
        commits = await _commits(stub) - commits
        list_runs = await _latencies(lambda: stub.ListRuns(pb.ListRunsRequest()), 0.5)
        list_workers = await _latencies(lambda: stub.ListWorkers(pb.ListWorkersRequest()), 0.5)
    return Row(
        num_workers,
        num_runs,
        1000 * register_s / num_workers,
        cpu_s / took_s,
        _memory_mb(pid),
        commits / took_s,
        _p50_p99(beats),
        _p50_p99(states),
        _p50_p99(list_runs)[0],
        _p50_p99(list_workers)[0],
    )


_BEAT = pb.HeartbeatRequest(worker_id="w0000", incarnation=INCARNATION)


async def _commits(stub: Any) -> int:
    runs = (await stub.ListRuns(pb.ListRunsRequest())).runs
    return sum(run.segment for run in runs)


async def _latencies(call: Callable[[], Awaitable[object]], seconds: float) -> list[float]:
    """Milliseconds of calls that are made at fixed times, one after another."""
    found: list[float] = []
    end_s = time.monotonic() + seconds
    while (began_s := time.monotonic()) < end_s or not found:
        await call()
        took_s = time.monotonic() - began_s
        found.append(1000 * took_s)
        await asyncio.sleep(max(0.0, 1 / CALLS_PER_S - took_s))
    return found


def _p50_p99(values: list[float]) -> tuple[float, float]:
    low, high = np.percentile(values, [50, 99])
    return float(low), float(high)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def main() -> None:
    if sys.argv[1:2] == ["--simulate"]:
        asyncio.run(simulate(sys.argv[2], int(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--runs", type=int, nargs="+", default=[5, 15, 50])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each row")
    args = parser.parse_args()
    print(" | ".join(HEAD))
    for num_workers in args.workers:
        print(" | ".join(measure(num_workers, 0, args.seconds).cells()), flush=True)
    for num_runs in args.runs:
        print(" | ".join(measure(max(args.workers), num_runs, args.seconds).cells()), flush=True)


if __name__ == "__main__":
    main()
