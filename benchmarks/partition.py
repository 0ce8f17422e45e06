"""What a divided optimizer state saves and costs: python benchmarks/partition.py --members 2 3 4

Processes on this machine over loopback, one thread each, tuned malloc in all, AdamW. Variants take
turns inside one run: "replicated" keeps all moments everywhere, "slices" those of its own slice
(partition_state, mirror 0), "mirror" the neighbour's too; each over shared memory and over gloo;
"fsdp2" is torch's fully_shard over gloo, of each layer and of the whole. Printed are the moments of
a member in MB, the median and the best of the slowest member's step in ms, CPU time of a member,
and the median of the ratios per round to "replicated" over the same engine, which for fsdp2 is
gloo. The first variants have the same bits, which is checked.
"""

import argparse
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._C._distributed_c10d import FileStore  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from benchmarks.data_parallel import Setup, Times, form, ratio  # noqa: E402
from stratagem.common.job import JobSpec  # noqa: E402
from stratagem.common.process.malloc import tune_malloc  # noqa: E402
from stratagem.worker.engine import Trainer, build_sliced_trainer, build_trainer  # noqa: E402
from stratagem.worker.engine.trainers.optimizer_pieces import StateShare  # noqa: E402
from stratagem.worker.exchange import mesh_exchange, sliced_exchange  # noqa: E402
from stratagem.worker.user_code.entrypoints import EntryPoints  # noqa: E402

WIDTH, NUM_LAYERS, BATCH = 1024, 4, 96
ENGINES = ("shm", "gloo")
VARIANTS = (*(f"{kind} {e}" for e in ENGINES for kind in ("replicated", "slices", "mirror")),)
FSDP = "fsdp2 gloo"
CPU = torch.device("cpu")


def build() -> nn.Module:
    """4.2 M parameters."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))


def load() -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * BATCH, WIDTH, generator=generator)
    return {"train": (x, x.flip(1))}


def job_of(size: int) -> JobSpec:
    return JobSpec.parse(
        {
            "name": "partition",
            "model": {"entrypoint": "benchmarks.partition:build"},
            "data": {"entrypoint": "benchmarks.partition:load"},
            "loss": "mse",
            "optimizer": {"name": "adamw", "lr": 0.001},
            "steps": 1_000_000,
            "batch_size": BATCH,
            "strategy": {
                "type": "DataParallel",
                "num_replicas": size,
                "aggregation": {"method": "AllReduce"},
            },
        }
    )


@dataclass(frozen=True)
class Variant:
    step: Callable[[], object]
    optimizer: torch.optim.Optimizer
    trainer: Trainer | None = None

    def moments_mb(self) -> float:
        tensors = [v for state in self.optimizer.state.values() for v in state.values()]
        return sum(local(t).nbytes for t in tensors if isinstance(t, Tensor)) / 1e6

    def params(self) -> list[Tensor]:
        return [] if self.trainer is None else [p for _, p in self.trainer.params]


def local(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def make(variant: str, setup: Setup) -> Variant:
    if variant == FSDP:
        return make_fsdp(setup)
    kind, engine = variant.split()
    spec, allowed = job_of(setup.size), EntryPoints(["benchmarks.partition:*"])
    link = form(engine, setup)
    if kind == "replicated":
        trainer = build_trainer(spec, allowed, device=CPU, fresh=True)
        exchange = mesh_exchange(trainer.buckets, link, setup.size)
    else:
        share = StateShare(setup.rank, setup.size, kind == "mirror")
        trainer = build_sliced_trainer(spec, allowed, share, device=CPU, fresh=True)
        assert trainer.pieces is not None
        owners, is_mirrored = trainer.pieces.owners, trainer.pieces.is_mirrored
        exchange = sliced_exchange(
            trainer.buckets, link, setup.size, owners, is_mirrored=is_mirrored
        )
    own = range(setup.rank, setup.rank + 1)
    return Variant(
        lambda: trainer.train_step(exchange, own, setup.size), trainer.optimizer, trainer
    )


def make_fsdp(setup: Setup) -> Variant:
    torch.manual_seed(0)
    model, mesh = build(), init_device_mesh("cpu", (setup.size,))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, fused=True)
    x, y = (part[setup.rank : BATCH : setup.size].contiguous() for part in load()["train"])

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return Variant(step, optimizer)


def run_member(pipe: Connection, rank: int, size: int, args: argparse.Namespace) -> None:
    tune_malloc()
    torch.set_num_threads(1)
    store = FileStore(args.store, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    made = {name: make(name, Setup("", rank, size, pipe)) for name in args.variants}
    for each in made.values():
        for _ in range(args.warmup):
            each.step()
    for round_num in range(args.rounds):
        turn = round_num % len(made)
        for name in args.variants[turn:] + args.variants[:turn]:
            dist.barrier()
            begun, cpu = time.perf_counter(), time.process_time()
            for _ in range(args.steps):
                made[name].step()
            wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
            pipe.send((name, wall_s / args.steps, cpu_s / args.steps))
    ours = [each.params() for each in made.values() if each.trainer is not None]
    same = all(torch.equal(a, b) for other in ours for a, b in zip(ours[0], other, strict=True))
    pipe.send(({name: each.moments_mb() for name, each in made.items()}, same))
    pipe.recv()
    os._exit(0)  # groups of three kinds are alive


def measure(size: int, args: argparse.Namespace) -> None:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="stratagem-benchmark-") as folder:
        args.store = f"{folder}/store"
        pipes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            member = (theirs, rank, size, args)
            context.Process(target=run_member, args=member, daemon=True).start()
            pipes.append(ours)
        for _ in [name for name in args.variants if name != FSDP]:
            addresses = [pipe.recv() for pipe in pipes]
            for pipe in pipes:
                pipe.send(addresses)
        times = {name: Times() for name in args.variants}
        for _ in range(args.rounds * len(args.variants)):
            told = [pipe.recv() for pipe in pipes]
            times[told[0][0]].wall_s.append(max(wall_s for _, wall_s, _ in told))
            times[told[0][0]].cpu_s.append(statistics.mean(cpu_s for *_, cpu_s in told))
        ends = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(None)
    for name in args.variants:
        moments = max(held[name] for held, _ in ends)
        compared = times[f"replicated {name.split()[1]}"]
        slower = ratio(times[name], compared)
        print(f"{size} {name:<16} {moments:6.1f} MB {times[name]!s} {slower:.2f}")
    print("bits equal" if all(same for _, same in ends) else "OTHER BITS", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--steps", type=int, default=2, help="steps per round and variant")
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    args.variants = [*VARIANTS, FSDP]
    print("N variant        moments    median    min    CPU ms / replicated")
    for size in args.members:
        measure(size, args)


if __name__ == "__main__":
    main()
