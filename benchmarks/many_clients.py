"""What a round costs the coordinator when a federation has thousands of clients; few train.

    python benchmarks/many_clients.py --clients 1000 10000
    python benchmarks/many_clients.py --clients 10000 --sites

The coordinator is the real one, in a process of its own, with durable journal and store. The
clients are stubbed in another process: they answer every call at once, over gRPC, and send a model
of 0.2 MB. So the seconds of a round are those of selecting, telling, collecting and folding.

Without `--sites` two workers simulate all clients; with it each client is a site, a worker of its
own, and joins an open roster. Seconds are medians over rounds after the first two; the CPU is the
coordinator's, and its memory the peak resident size above what it had before the run.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.federated_round import cpu_s, reset_peak, resident_bytes  # noqa: E402
from stratagem.client import Client, Event  # noqa: E402
from stratagem.common.numerics.rules import CURRENT  # noqa: E402
from stratagem.common.process.file_descriptors import raise_descriptor_limit  # noqa: E402
from stratagem.common.rpc.channel import open_channel  # noqa: E402
from stratagem.common.rpc.server import bind, make_server  # noqa: E402
from stratagem.common.rpc.tensor_transfer import receive_header, receive_upload, serve_get  # noqa: E402
from stratagem.common.tensors.manifest import Limits, Purpose, build_manifest, from_proto  # noqa: E402
from stratagem.common.tensors.stream import ChunkWriter  # noqa: E402
from stratagem.v1 import coordinator_pb2, types_pb2, worker_pb2  # noqa: E402
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub  # noqa: E402
from stratagem.v1.worker_pb2_grpc import (  # noqa: E402
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)
from tests.free_ports import free_port  # noqa: E402

INCARNATION = "simulated"
MODEL_FLOATS = 50_000
ROWS = 20
BEAT_S = 60.0
NUM_WARMUP_ROUNDS = 2
ASKED_EACH_S = 0.5


def job(num_clients: int, asked: int, rounds: int, *, are_sites: bool) -> dict[str, Any]:
    roster = {"open": True, "min_clients": num_clients}
    return {
        "name": "many",
        "model": {"entrypoint": "nowhere:model"},
        "data": {"entrypoint": "nowhere:data"},
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch_size": 10,
        "partition": {"method": "contiguous"},
        "strategy": {
            "type": "Federated",
            "num_clients": num_clients,
            "rounds": rounds,
            "aggregation": {"method": "FedAvg"},
            "client_selection": {"method": "Random", "fraction": asked / num_clients},
            "options": {"roster": roster} if are_sites else {},
        },
    }


# ---- the clients ----


class StubbedClients(WorkerServiceServicer):
    """All workers at once: every call is answered the same, whoever is asked.

    Each has an address of its own: gRPC shares one connection among channels to the same one.
    """

    def __init__(self, num_clients: int) -> None:
        self._num_rows = num_clients * ROWS
        self._content = [np.zeros(MODEL_FLOATS, np.float32).data.cast("B")]
        named = [("weight", "float32", (MODEL_FLOATS,))]
        self._manifests = {p: build_manifest(named, p) for p in (Purpose.STATE, Purpose.UPDATE)}

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(incarnation=INCARNATION)

    async def Execute(
        self, request: worker_pb2.ExecuteRequest, context: Any
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        yield worker_pb2.ExecuteResponse(accepted=worker_pb2.Accepted(incarnation=INCARNATION))
        if request.WhichOneof("plan") == "build":
            built = worker_pb2.BuildResult(
                num_rows={"train": self._num_rows},
                num_parameters=MODEL_FLOATS,
                layout_digest="x",
            )
            result = worker_pb2.ExecuteResult(build=built)
        else:
            trained = worker_pb2.ClientRoundResult(
                num_samples=ROWS, loss=0.5, seconds=0.1, num_steps=2
            )
            result = worker_pb2.ExecuteResult(client_round=trained)
        yield worker_pb2.ExecuteResponse(result=result)

    async def GetState(
        self, request: worker_pb2.GetStateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GetStateResponse]:
        is_update = request.session.party.rpartition("/")[2].startswith("client")
        manifest = self._manifests[Purpose.UPDATE if is_update else Purpose.STATE]
        responses = serve_get(worker_pb2.GetStateResponse, manifest, self._content, request.offset)
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


async def simulate(coordinator: str, num_workers: int, num_clients: int) -> None:
    """Serve, register and beat; says on standard output how long registering took."""
    server = make_server()
    add_WorkerServiceServicer_to_server(StubbedClients(num_clients), server)
    raise_descriptor_limit()
    hosts = [f"127.1.{n // 250}.{n % 250 + 1}" for n in range(num_workers)]
    addresses = [f"{host}:{bind(server, host, 0)}" for host in hosts]
    await server.start()
    stub = CoordinatorServiceStub(open_channel(coordinator))
    joining = asyncio.Semaphore(64)

    async def register(n: int) -> None:
        request = coordinator_pb2.RegisterWorkerRequest(
            worker_id=f"w{n:05}",
            incarnation=INCARNATION,
            address=addresses[n],
            capability=types_pb2.Capability(
                device="cpu", numerics_fingerprint="same", numerics_rules=CURRENT
            ),
        )
        async with joining:
            await stub.RegisterWorker(request, timeout=120)

    began_s = time.monotonic()
    await asyncio.gather(*(register(n) for n in range(num_workers)))
    print(json.dumps(time.monotonic() - began_s), flush=True)

    async def beat(n: int) -> None:
        await asyncio.sleep(BEAT_S * n / num_workers)
        request = coordinator_pb2.HeartbeatRequest(worker_id=f"w{n:05}", incarnation=INCARNATION)
        while True:
            await stub.Heartbeat(request, timeout=60)
            await asyncio.sleep(BEAT_S)

    await asyncio.gather(*(beat(n) for n in range(num_workers)))


# ---- measuring ----


@dataclass
class Seen:
    """What was seen of one run."""

    register_s: float = 0.0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    bytes_of: collections.Counter[str] = field(default_factory=collections.Counter)
    """By kind of fact, of all payloads."""
    committed_s: list[float] = field(default_factory=list)
    used_s: list[float] = field(default_factory=list)
    """CPU seconds of the coordinator until each of them."""
    first_s: float = 0.0
    """From the submission to the first round."""
    fold_s: list[float] = field(default_factory=list)
    """From the closing of each round to its commit."""
    status_ms: list[float] = field(default_factory=list)
    list_ms: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    idle_mb: float = 0.0

    def row(self) -> list[str]:
        gaps = [after - before for before, after in pairwise(self.committed_s)]
        used = [after - before for before, after in pairwise(self.used_s)]
        latencies = [
            f"{statistics.median(each):.1f} / {max(each):.1f}"
            for each in (self.status_ms, self.list_ms)
        ]
        of_round = [
            f"{statistics.median(each[NUM_WARMUP_ROUNDS - 1 :]):.3f}"
            for each in (gaps, used, self.fold_s)
        ]
        return [
            *of_round,
            f"{max(gaps[NUM_WARMUP_ROUNDS - 1 :]):.3f}",
            f"{self.first_s:.2f}",
            f"{self.register_s:.1f}",
            f"{self.idle_mb:.0f}",
            f"{self.peak_mb - self.idle_mb:.0f}",
            *latencies,
        ]


HEAD = [
    "clients",
    "s/round",
    "CPU s/round",
    "close to commit s",
    "slowest s",
    "first round s",
    "register s",
    "idle MB",
    "peak above idle MB",
    "status ms (median / max)",
    "list ms",
]


def measure(num_clients: int, asked: int, rounds: int, *, are_sites: bool) -> Seen:
    """One coordinator, one run."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = f"127.0.0.1:{free_port()}"
        coordinator = stack.enter_context(_coordinator(folder, address))
        num_workers = num_clients if are_sites else 2
        command = [sys.executable, __file__, "--simulate", address]
        command += [str(num_workers), str(num_clients)]
        simulated = subprocess.Popen(command, stdout=subprocess.PIPE)
        stack.callback(_end, simulated)
        assert simulated.stdout is not None
        seen = Seen(register_s=float(json.loads(simulated.stdout.readline())))
        seen.idle_mb = resident_bytes(coordinator.pid, "VmRSS") / 1e6
        reset_peak(coordinator.pid)
        client = stack.enter_context(Client(address))
        _follow(client, coordinator.pid, job(num_clients, asked, rounds, are_sites=are_sites), seen)
        seen.peak_mb = resident_bytes(coordinator.pid, "VmHWM") / 1e6
        return seen


def _follow(client: Client, pid: int, submitted: dict[str, Any], seen: Seen) -> None:
    """Submit the job, read its facts to the end, and ask beside that how the run is."""
    began_s = time.monotonic()
    run = client.submit(submitted)
    has_ended = threading.Event()

    def ask() -> None:
        while not has_ended.wait(ASKED_EACH_S):
            for call, found in ((run.status, seen.status_ms), (client.runs, seen.list_ms)):
                asked_s = time.monotonic()
                call()
                found.append(1000 * (time.monotonic() - asked_s))

    asking = threading.Thread(target=ask)
    asking.start()
    closed_s = 0.0
    for event in run.watch():
        if not isinstance(event, Event):
            continue
        seen.kinds[event.kind] += 1
        seen.bytes_of[event.kind] += len(json.dumps(dict(event.payload)))
        if event.kind == "ClientsSelected" and not seen.first_s:
            seen.first_s = time.monotonic() - began_s
        if event.kind == "RoundClosed":
            closed_s = event.leader_s
        if event.kind == "SegmentCommitted":
            seen.committed_s.append(event.leader_s)
            seen.used_s.append(cpu_s([pid]))
            seen.fold_s.append(event.leader_s - closed_s)
    has_ended.set()
    asking.join()
    run.result()


@contextmanager
def _coordinator(folder: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A coordinator that serves; its log is read for nobody."""
    flags = ["--listen", address, "--data-dir", str(folder / "data")]
    flags += ["--heartbeat-interval-s", str(BEAT_S), "--worker-ttl-s", str(5 * BEAT_S)]
    command = [sys.executable, "-m", "stratagem.coordinator", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        log, said = process.stderr, b""
        assert log is not None
        while b"coordinator serves" not in said:
            line = log.readline()
            assert line, said.decode()
            said += line
        threading.Thread(target=lambda: collections.deque(log, maxlen=0), daemon=True).start()
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def main() -> None:
    if sys.argv[1:2] == ["--simulate"]:
        asyncio.run(simulate(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--asked", type=int, default=100, help="clients of a round")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sites", action="store_true", help="each client is a worker of its own")
    parser.add_argument("--facts", action="store_true", help="show number and size of all facts")
    args = parser.parse_args()
    print(" | ".join(HEAD))
    for num_clients in args.clients:
        seen = measure(num_clients, args.asked, args.rounds, are_sites=args.sites)
        print(" | ".join([str(num_clients), *seen.row()]), flush=True)
        if args.facts:
            for kind, number in sorted(seen.kinds.items()):
                print(f"    {number:>6} {kind}, {seen.bytes_of[kind] / number:.0f} bytes each")


if __name__ == "__main__":
    main()
