"""Step time of synchronous data parallelism over each engine, torch's DDP, and no exchange at all.

    python benchmarks/data_parallel.py --members 2 --rounds 15

Processes on this machine over loopback, one thread each, tuned malloc in all. The variants take
turns inside one run, so that whatever else the machine does hits all of them. The time of a round
is that of its slowest member. Printed are median and minimum over rounds, the CPU time of a
member (steadier under foreign load), and the medians of the per-round ratios to DDP and to "none",
which computes the same and exchanges nothing: the floor. "shm", "gloo", "grpc" and "tls", which is
gRPC with certificates, have the same bits; "ring" and "native" go over gloo too and have bits of
their own.
"""

import argparse
import asyncio
import itertools
import multiprocessing as mp
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

from stratagem.common.identity.callers import Authorizer
from stratagem.common.identity.certificates import make_authority
from stratagem.common.identity.tls import Role, TlsFiles
from stratagem.common.process.process import tune_malloc
from stratagem.common.rpc.channel import Proof
from stratagem.common.rpc.server import bind, bind_tls, make_server
from stratagem.v1 import peer_pb2_grpc
from stratagem.worker.exchange import GradientBuckets, StepScalars, mesh_exchange
from stratagem.worker.exchange.transports import num_scalars
from stratagem.worker.mesh import Link, SharedGroup, form_gloo
from stratagem.worker.mesh.grpc import form_grpc
from stratagem.worker.mesh.peers import Group, PeerHub, PeerServicer
from stratagem.worker.mesh.shm import SharedListener, form_shared

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers.training import GLOBAL_BATCH, make_model, make_rows

ENGINES = ("shm", "gloo", "grpc", "tls")
UNORDERED = ("ring", "native")
NO_MORE = torch.zeros(0, dtype=torch.float64)
VARIANTS = (*ENGINES, *UNORDERED, "ddp", "none")


def make_batch(name: str, rank: int, size: int) -> tuple[Tensor, Tensor]:
    inputs, targets = make_rows(name, GLOBAL_BATCH[name] // size, rank)
    return inputs, targets.flatten()


@dataclass(frozen=True)
class Setup:
    name: str
    rank: int
    size: int
    pipe: Connection
    certificate: TlsFiles | None = None


def make_step(variant: str, setup: Setup) -> Callable[[], None]:
    """One training step of the variant on a model of its own."""
    model = make_model(setup.name)
    inputs, targets = make_batch(setup.name, setup.rank, setup.size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    if variant in (*ENGINES, *UNORDERED):
        return make_our_step(
            model, setup, lambda: loss_of(model(inputs), targets), optimizer, variant
        )
    called: nn.Module = model
    if variant == "ddp":
        called = nn.parallel.DistributedDataParallel(model)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(called(inputs), targets).backward()
        optimizer.step()

    return step


def make_our_step(
    model: nn.Module,
    setup: Setup,
    loss_of: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    variant: str,
) -> Callable[[], None]:
    params = list(model.named_parameters())
    buckets = GradientBuckets(params, num_extras=num_scalars(len(params), 0))
    all_reduce = variant if variant in UNORDERED else "direct"
    exchange = mesh_exchange(buckets, form(variant, setup), setup.size, all_reduce=all_reduce)
    rank, steps, total = setup.rank, itertools.count(), float(GLOBAL_BATCH[setup.name])
    weight = total / setup.size

    def step() -> None:
        exchange.begin_step(next(steps), range(rank, rank + 1), setup.size, divisor=total)
        exchange.begin_shard(rank)
        loss = loss_of() * weight
        loss.backward()
        exchange.end_shard(rank, StepScalars(weight, loss.item(), 0.0, exchange.reached(), NO_MORE))
        exchange.finish()
        optimizer.step()

    return step


def form(variant: str, setup: Setup) -> Link | SharedGroup:
    def rendezvous(address: bytes) -> list[bytes]:
        setup.pipe.send(address)
        answered: list[bytes] = setup.pipe.recv()
        return answered

    rank, size = setup.rank, setup.size
    match variant:
        case "shm":
            listener = SharedListener()
            return form_shared(listener, rank, size, rendezvous(listener.address), 60.0)
        case "grpc" | "tls":
            certificate = setup.certificate if variant == "tls" else None
            # All members have one certificate here, and so one name.
            names = () if certificate is None else ("w",) * size
            group = Group("run", "", 1, 1, rank, size, names)
            return form_grpc(serve_peers(certificate), group, rendezvous, 60.0)
        case _:
            return form_gloo(rank, size, "127.0.0.1", rendezvous, 60.0)


def serve_peers(certificate: TlsFiles | None) -> PeerHub:
    """As a worker process does, on an event loop in a thread that lives as long as the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> PeerHub:
        server = make_server(gate=Authorizer("" if certificate is None else "stratagem"))
        if certificate is None:
            port = bind(server, "127.0.0.1", 0)
        else:
            port = bind_tls(server, "127.0.0.1", 0, certificate)
        hub = PeerHub(f"127.0.0.1:{port}", Proof(certificate))
        peer_pb2_grpc.add_PeerServiceServicer_to_server(PeerServicer(hub), server)
        await server.start()
        _kept.append(server)
        return hub

    return asyncio.run_coroutine_threadsafe(start(), loop).result()


_kept: list[object] = []


def run_member(pipe: Connection, name: str, rank: int, size: int, args: argparse.Namespace) -> None:
    tune_malloc()
    torch.set_num_threads(1)
    store = FileStore(args.store, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    setup = Setup(name, rank, size, pipe, args.certificate)
    steps = {variant: make_step(variant, setup) for variant in args.variants}
    for step in steps.values():
        for _ in range(args.warmup):
            step()
    for round_num in range(args.rounds):
        turn = round_num % len(steps)
        for variant in args.variants[turn:] + args.variants[:turn]:
            dist.monitored_barrier(timeout=timedelta(seconds=60))
            begun, cpu = time.perf_counter(), time.process_time()
            for _ in range(args.steps):
                steps[variant]()
            wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
            pipe.send((variant, wall_s / args.steps, cpu_s / args.steps))
    pipe.recv()
    # Groups of three kinds are alive; the interpreter's own end would take them apart at random.
    os._exit(0)


@dataclass
class Times:
    """Seconds per step, by round."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        values = statistics.median(self.wall_s), min(self.wall_s), statistics.median(self.cpu_s)
        return "{:7.1f} {:6.1f} {:6.1f}".format(*(1e3 * value for value in values))


def measure(name: str, size: int, args: argparse.Namespace) -> dict[str, Times]:
    """By variant."""
    context = mp.get_context("spawn")
    folder = Path(tempfile.mkdtemp(prefix="stratagem-benchmark-"))
    args.store = str(folder / "store")
    args.certificate = make_authority(folder).issue(Role.WORKER, "w")
    pipes = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        context.Process(
            target=run_member, args=(theirs, name, rank, size, args), daemon=True
        ).start()
        pipes.append(ours)
    for _ in [variant for variant in args.variants if variant in (*ENGINES, *UNORDERED)]:
        addresses = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(addresses)
    times = {variant: Times() for variant in args.variants}
    for _ in range(args.rounds * len(args.variants)):
        told = [pipe.recv() for pipe in pipes]
        times[told[0][0]].wall_s.append(max(wall_s for _, wall_s, _ in told))
        times[told[0][0]].cpu_s.append(statistics.mean(cpu_s for *_, cpu_s in told))
    for pipe in pipes:
        pipe.send(None)
    shutil.rmtree(folder)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, nargs="+", default=[2])
    parser.add_argument("--models", nargs="+", default=["mlp", "transformer"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="steps per round and variant")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="with ddp and none"
    )
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; ms per step")
    print(f"{'model':<12} {'N':>2} {'':<7} {'median':>7} {'min':>6} {'CPU':>6}   / DDP  / none")
    for name in args.models:
        for size in args.members:
            times = measure(name, size, args)
            for variant in args.variants:
                ratios = [ratio(times[variant], times[other]) for other in ("ddp", "none")]
                cells = " ".join(f"{value:7.3f}" for value in ratios)
                print(f"{name:<12} {size:>2} {variant:<7} {times[variant]!s} {cells}", flush=True)


def ratio(times: Times, others: Times) -> float:
    """Median of the ratios per round."""
    pairs = zip(times.wall_s, others.wall_s, strict=True)
    return statistics.median(own / other for own, other in pairs)


if __name__ == "__main__":
    main()
