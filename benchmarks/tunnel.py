"""What a tunnel costs: a worker reached over streams that it keeps open, beside one dialled.

    python benchmarks/tunnel.py                       # loopback, and the memory of 500 parked sites
    python benchmarks/tunnel.py --rate 100mbit        # between two network namespaces (root, tbf)
    python benchmarks/tunnel.py --tls                 # with certificates, so TLS in TLS in a tunnel

Coordinator and worker are processes of their own; ways alternate. `tunnel_rounds.py` measures whole
rounds of a federation.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any, Final

import grpc.aio

from stratagem.common.base.ids import Incarnation, WorkerId
from stratagem.common.identity.callers import Authorizer
from stratagem.common.identity.certificates import Authority, init
from stratagem.common.identity.tls import DEFAULT_TRUST_DOMAIN
from stratagem.common.process.file_descriptors import raise_descriptor_limit
from stratagem.common.process.process import tune_malloc
from stratagem.common.rpc.admission import CallLimits
from stratagem.common.rpc.channel import PLAINTEXT, Coordinators, Proof
from stratagem.common.rpc.server import bind, bind_socket, bind_tls, make_server
from stratagem.common.rpc.streams import SocketFolder
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.runtime.links import WorkerLink
from stratagem.coordinator.runtime.relay import RelayHub
from stratagem.coordinator.service.workers import relay_connection
from stratagem.v1 import coordinator_pb2_grpc, tensor_pb2, worker_pb2, worker_pb2_grpc
from stratagem.worker.process.tunnel import Tunnel

CHUNK: Final = bytes(2**20)
NAMES: Final = ("stratagem-c", "stratagem-w")
READY: Final = "ready "
PLACES: Final = ("10.201.0.1", "10.201.0.2")


class Coordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    def __init__(self, hub: RelayHub) -> None:
        self._hub = hub

    async def Relay(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        await relay_connection(self._hub, requests, context, 30.0)


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(incarnation="one")

    async def GetState(
        self, request: worker_pb2.GetStateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GetStateResponse]:
        for _ in range(request.snapshot):
            yield worker_pb2.GetStateResponse(chunk=tensor_pb2.Chunk(data=CHUNK))

    async def SetState(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            pass
        yield worker_pb2.SetStateResponse(committed=True)


def proof_of(role: str, given: argparse.Namespace) -> Proof:
    """The certificate of a role; none without TLS."""
    folder = given.certificates
    return Proof(Authority(folder).files(role)) if folder else PLAINTEXT


def server_of(proof: Proof, limits: CallLimits) -> grpc.aio.Server:
    """A server that lets in those whom the certificates allow."""
    return make_server(limits, gate=Authorizer(DEFAULT_TRUST_DOMAIN) if proof.tls else None)


def listen(server: grpc.aio.Server, host: str, proof: Proof) -> str:
    """Listen on a free port; host:port."""
    if proof.tls:
        return f"{host}:{bind_tls(server, host, 0, proof.tls)}"
    return f"{host}:{bind(server, host, 0, allow_insecure_network=True)}"


async def serve_worker(given: argparse.Namespace) -> None:
    proof = proof_of("worker-w", given)
    sockets, server = SocketFolder(), server_of(proof, CallLimits())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), server)
    path = sockets.path("server.sock")
    bind_socket(server, path, proof.tls)
    address = listen(server, given.host, proof)
    await server.start()
    print(f"{READY}{address}", flush=True)
    await Tunnel(Coordinators((given.worker,)), "w", "one", path, proof).run()


async def serve_sites(given: argparse.Namespace) -> None:
    proof = proof_of("worker-w", given)
    tunnels = [
        Tunnel(Coordinators((given.park,)), f"site-{number}", "one", "/nowhere", proof)
        for number in range(given.sites)
    ]
    running = [asyncio.create_task(tunnel.run()) for tunnel in tunnels]
    await asyncio.gather(*(tunnel.is_parked.wait() for tunnel in tunnels))
    print(READY, flush=True)
    await asyncio.gather(*running)


async def measure(given: argparse.Namespace) -> None:
    hub, proof = RelayHub(lambda _: True), proof_of("coordinator", given)
    server = server_of(proof, CallLimits(unlimited=("Relay",)))
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(Coordinator(hub), server)
    address = listen(server, given.host, proof)
    await server.start()
    program = [sys.executable, __file__]
    if given.certificates:
        program += ["--certificates", str(given.certificates)]
    in_namespace = ["ip", "netns", "exec", NAMES[1]] if given.rate else []
    host = PLACES[1] if given.rate else given.host
    async with said_by([*in_namespace, *program, "--worker", address, "--host", host]) as dialled:
        await compare(hub, dialled, given)
    if not given.rate:
        before = rss_mib()
        async with said_by([*program, "--park", address, "--sites", str(given.sites)]):
            parked = hub.counts()["parked"]
            print(f"{parked} parked sites: {rss_mib() - before:.0f} MiB more in the coordinator")
    await server.stop(0)


async def compare(hub: RelayHub, dialled: str, given: argparse.Namespace) -> None:
    member = Member(worker_id=WorkerId("w"), incarnation=Incarnation("one"))
    proof = proof_of("coordinator", given)
    links = {
        "direct": WorkerLink(member, dialled, 1, proof, hub),
        "tunnel": WorkerLink(member, "", 1, proof, hub),
    }
    calls: dict[str, Callable[[WorkerLink], Awaitable[None]]] = {
        "small call": describe,
        f"pull {given.mib} MiB": lambda link: pull(link, given.mib),
        f"push {given.mib} MiB": lambda link: push(link, given.mib),
    }
    for what, call in calls.items():
        repeats = given.repeat * (20 if what == "small call" else 1)
        seconds: dict[str, list[float]] = {way: [] for way in links}
        cpu: dict[str, list[float]] = {way: [] for way in links}
        for number in range(repeats + 1):
            for way, link in links.items():
                began_s, cpu_s = time.perf_counter(), time.process_time()
                await call(link)
                if number:  # the first one connects
                    seconds[way].append(time.perf_counter() - began_s)
                    cpu[way].append(time.process_time() - cpu_s)
        direct, tunnel = (1e3 * median(seconds[way]) for way in links)
        spent = ", ".join(f"{1e3 * median(cpu[way]):.1f}" for way in links)
        rate = "" if what == "small call" else f", {given.mib * 2**23 / tunnel / 1e6:.2f} Gbit/s"
        print(
            f"{what}: direct {direct:.2f} ms, tunnel {tunnel:.2f} ms{rate}, "
            f"ratio {tunnel / direct:.3f}; CPU of the coordinator {spent} ms",
            flush=True,
        )
    for link in links.values():
        await link.close()


async def describe(link: WorkerLink) -> None:
    await link.stub.Describe(worker_pb2.DescribeRequest())


async def pull(link: WorkerLink, mib: int) -> None:
    num_bytes = 0
    async for response in link.stub.GetState(worker_pb2.GetStateRequest(snapshot=mib)):
        num_bytes += len(response.chunk.data)
    assert num_bytes == mib * len(CHUNK)


async def push(link: WorkerLink, mib: int) -> None:
    def requests() -> Iterator[worker_pb2.SetStateRequest]:
        for _ in range(mib):
            yield worker_pb2.SetStateRequest(chunk=tensor_pb2.Chunk(data=CHUNK))

    async for response in link.stub.SetState(requests()):
        assert response.committed


@asynccontextmanager
async def said_by(command: list[str]) -> AsyncIterator[str]:
    """A process, and what it says behind READY."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        try:
            line = await asyncio.to_thread(_ready_line, process.stdout)
            yield line.removeprefix(READY).strip()
        finally:
            process.kill()


def _ready_line(said: IO[str]) -> str:
    return next(line for line in said if line.startswith(READY))


def rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def namespaces(rate: str) -> Iterator[None]:
    """Two network namespaces with a link of this rate between them."""
    ends = ("veth-sc", "veth-sw")
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, place in zip(NAMES, ends, PLACES, strict=True):
            run("ip", "link", "set", end, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{place}/24", "dev", end)
            run("ip", "-n", name, "link", "set", end, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            shaped = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", end, "root", *shaped)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--sites", type=int, default=500)
    parser.add_argument("--rate", default="", help="of the link, such as 100mbit")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--tls", action="store_true", help="each proves who it is, both ways")
    parser.add_argument("--certificates", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--park", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    tune_malloc()
    raise_descriptor_limit()
    if given.worker:
        asyncio.run(serve_worker(given))
    elif given.park:
        asyncio.run(serve_sites(given))
    elif given.rate and not given.inside:
        with namespaces(given.rate):
            inside = [sys.executable, __file__, *sys.argv[1:], "--inside", "--host", PLACES[0]]
            run("ip", "netns", "exec", NAMES[0], *inside)
    else:
        print("load", *(f"{load:.1f}" for load in os.getloadavg()), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            if given.tls:
                given.certificates = Path(folder) / "certificates"
                init(given.certificates, workers=["w"], clients=[], hosts=[given.host])
            asyncio.run(measure(given))


if __name__ == "__main__":
    main()
