"""Step time of a pipeline: ours over shared memory or PeerService, torch's over gloo, and
computing alone.

    python benchmarks/pipeline.py --rounds 9

Two stages, eight micro-batches, torch's under 1F1B; each stage a process on this machine with one
thread and tuned malloc, loopback between them. The variants take turns inside one run. A step is
forward, backward and an SGD step; its time is that of the slower process. "alone" is one process
that computes both stages of all micro-batches with nothing in between, and measures each: "floor"
is the longest way through the 1F1B schedule with those times and free hops. Printed are median and
minimum over rounds, and the medians of the ratios per round.
"""

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from stratagem.common.job import JobSpec
from stratagem.common.pipeline.schedules import one_f_one_b
from stratagem.common.process.process import tune_malloc
from stratagem.worker.mesh.grpc import form_grpc
from stratagem.worker.mesh.link import MessageLink
from stratagem.worker.mesh.peers import Group
from stratagem.worker.mesh.shm import SharedListener, connect
from stratagem.worker.mesh.shm_messages import SlotLink
from stratagem.worker.pipeline.build import RankEndpoint, StageAssignment, build_stage_runner
from stratagem.worker.pipeline.messages import PeerTransport
from stratagem.worker.user_code.entrypoints import EntryPoints

sys.path.append(str(Path(__file__).parents[1]))  # the job names this file as benchmarks.pipeline

from tests.worker.mesh.engines import hub_in_a_thread

SIZE, NUM_MICRO_BATCHES = 2, 8
VARIANTS = ("ours", "torch", "alone")
VOCABULARY, WIDTH, TOKENS = 4000, 256, 32


class Flat(nn.Module):
    """Tokens become rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


def build(num_layers: int = 6) -> nn.Module:
    """About 7 M parameters; the cut is after half of the layers."""
    layers = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(num_layers)
    ]
    head = nn.Linear(WIDTH, VOCABULARY)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, head, Flat())


def load(num_rows: int = 64) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (num_rows, TOKENS + 1), generator=generator)
    return {"train": (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())}


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target.flatten())


def job(rows: int) -> JobSpec:
    return JobSpec.parse(
        {
            "name": "pipeline",
            "model": {"entrypoint": "benchmarks.pipeline:build"},
            "data": {"entrypoint": "benchmarks.pipeline:load", "kwargs": {"num_rows": rows}},
            "loss": "benchmarks.pipeline:cross_entropy",
            "optimizer": {"name": "sgd", "lr": 1e-3},
            "steps": 10**6,
            "batch_size": rows,
            "seed": 0,
        }
    )


def parts() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    whole = build()
    assert isinstance(whole, nn.Sequential)
    layers = list(whole)
    return nn.Sequential(*layers[:CUT]), nn.Sequential(*layers[CUT:])


NUM_NODES = 9
CUT = 5  # embedding and four layers; two layers and the head


@dataclass(frozen=True)
class Member:
    rank: int
    rows: int
    schedule: str
    """Of ours."""
    engine: str
    """What carries our activations: shm or grpc."""
    pipe: Connection
    hub: Any


def make_ours(member: Member) -> Callable[[], None]:
    def rendezvous(address: bytes) -> list[bytes]:
        member.pipe.send(address)
        answered: list[bytes] = member.pipe.recv()
        return answered

    link: MessageLink
    if member.engine == "grpc":
        link = form_grpc(member.hub, Group("run", "", 1, 1, member.rank, SIZE), rendezvous, 30.0)
    else:
        listener = SharedListener()
        addresses = rendezvous(listener.address)
        link = SlotLink(member.rank, SIZE, connect(listener, member.rank, SIZE, addresses, 30.0))
    names = [str(i) for i in range(NUM_NODES)]
    stages = (tuple(names[:CUT]), tuple(names[CUT:]))
    micro_batch_size = member.rows // NUM_MICRO_BATCHES
    placement = StageAssignment(stages, (0, 1), micro_batch_size, member.schedule)
    seat = RankEndpoint(member.rank, PeerTransport(link), 60.0)
    allowed = EntryPoints(["benchmarks.pipeline:*"])
    runner = build_stage_runner(job(member.rows), allowed, placement, seat, fresh=True)

    def step() -> None:
        runner.train_step()

    return step


def make_torch(member: Member) -> Callable[[], None]:
    module = parts()[member.rank]
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, foreach=False)
    stage = PipelineStage(module, member.rank, SIZE, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=cross_entropy)
    x, y = load(member.rows)["train"]

    def step() -> None:
        optimizer.zero_grad()
        if member.rank == 0:
            schedule.step(x)
        else:
            losses: list[Tensor] = []
            schedule.step(target=y, losses=losses)
        optimizer.step()

    return step


def make_alone(member: Member) -> Callable[[], float]:
    """Answers the floor: the longest way through 1F1B with the times just measured."""
    stages = parts()
    optimizer = torch.optim.SGD([p for s in stages for p in s.parameters()], lr=1e-3, foreach=False)
    data = load(member.rows)["train"]
    micro_batches = list(zip(*(t.chunk(NUM_MICRO_BATCHES) for t in data), strict=True))

    def step() -> float:
        took: dict[tuple[str, int, int], float] = {}
        begun = time.perf_counter()

        def lap(name: str, stage: int, micro_batch: int) -> None:
            nonlocal begun
            now = time.perf_counter()
            took[name, stage, micro_batch] = now - begun
            begun = now

        optimizer.zero_grad()
        for m, (x, y) in enumerate(micro_batches):
            hidden = stages[0](x)
            lap("F", 0, m)
            leaf = hidden.detach().requires_grad_()
            loss = cross_entropy(stages[1](leaf), y) / NUM_MICRO_BATCHES
            lap("F", 1, m)
            loss.backward()
            lap("B", 1, m)
            hidden.backward(leaf.grad)
            lap("B", 0, m)
        optimizer.step()
        lap("step", 0, 0)
        return critical_path(took) + took["step", 0, 0] / SIZE

    return step


def critical_path(took: dict[tuple[str, int, int], float]) -> float:
    """Makespan of 1F1B with measured times and free hops."""
    done: dict[tuple[str, int, int], float] = {}
    clocks, positions = [0.0] * SIZE, [0] * SIZE
    lists = one_f_one_b(SIZE, NUM_MICRO_BATCHES)
    while any(position < len(lists[k]) for k, position in enumerate(positions)):
        for k in range(SIZE):
            while positions[k] < len(lists[k]):
                action = lists[k][positions[k]]
                other = k - 1 if action.kind == "F" else k + 1
                key = (str(action.kind), other, action.micro_batch)
                if 0 <= other < SIZE and key not in done:
                    break
                own = (str(action.kind), k, action.micro_batch)
                clocks[k] = done[own] = max(clocks[k], done.get(key, 0.0)) + took[own]
                positions[k] += 1
    return max(clocks)


def run_member(pipe: Connection, rank: int, args: argparse.Namespace) -> None:
    tune_malloc()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(args.store, SIZE), rank=rank, world_size=SIZE)
    with hub_in_a_thread() as hub:
        member = Member(rank, args.rows, args.schedule, args.engine, pipe, hub)
        steps: dict[str, Callable[[], Any]] = {"ours": make_ours(member)}
        steps["torch"] = make_torch(member)
        steps["alone"] = make_alone(member) if rank == 0 else lambda: None
        for variant in VARIANTS:
            for _ in range(args.warmup):
                steps[variant]()
        for number in range(args.rounds):
            shift = number % len(VARIANTS)
            for variant in VARIANTS[shift:] + VARIANTS[:shift]:
                dist.barrier()
                begun = time.perf_counter()
                answers = [steps[variant]() for _ in range(args.steps)]
                took = (time.perf_counter() - begun) / args.steps
                floor = statistics.median(answers) if answers[0] is not None else 0.0
                pipe.send((variant, took, floor))
        pipe.recv()
        # Groups of two kinds are alive; the interpreter's own end would take them apart at random.
        os._exit(0)


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per step, by variant, "floor" being one of them, by round."""
    context = mp.get_context("spawn")
    args.store = f"/tmp/stratagem-benchmark-{os.getpid()}-pipeline"
    pipes = []
    for rank in range(SIZE):
        ours, theirs = context.Pipe()
        context.Process(target=run_member, args=(theirs, rank, args), daemon=True).start()
        pipes.append(ours)
    addresses = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)
    times: dict[str, list[float]] = {name: [] for name in (*VARIANTS, "floor")}
    for _ in range(args.rounds * len(VARIANTS)):
        told = [pipe.recv() for pipe in pipes]
        variant = told[0][0]
        times[variant].append(max(took for _, took, _ in told))
        if variant == "alone":
            times["floor"].append(told[0][2])
    for pipe in pipes:
        pipe.send(None)
    os.unlink(args.store)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="steps per round and variant")
    parser.add_argument("--rows", type=int, default=32, help="rows of a step")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--schedule", default="auto", help="ours: auto, 1f1b, eager, gpipe, zero_bubble"
    )
    parser.add_argument("--engine", default="shm", choices=("shm", "grpc"), help="ours")
    args = parser.parse_args()
    times = measure(args)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; ms per step of {args.rows} rows")
    for name, values in times.items():
        median, least = 1e3 * statistics.median(values), 1e3 * min(values)
        print(f"{name:>6}: median {median:6.1f}, min {least:6.1f}")
    for other in ("torch", "floor"):
        ratios = [ours / base for ours, base in zip(times["ours"], times[other], strict=True)]
        print(f"ours/{other}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
