"""What a divided state saves and costs: python benchmarks/partition.py --members 2 3 4

Processes on this machine over loopback, one thread each, tuned malloc in all, AdamW. Variants take
turns inside one run: "replicated" keeps all moments everywhere, "slices" those of its own slice
(partition_state, mirror 0), "mirror" the neighbour's too, "full" a slice of the parameters, too,
and "full-mirror" the neighbour's of both; each over shared memory and over gloo; "fsdp2" is torch's
fully_shard over gloo, of each layer and of the whole, which frees parameters after forward. Printed
are the moments of a member in MB, the
median and the best of the slowest member's step in ms, CPU time of a member, and the median of the
ratios per round to "replicated" over the same engine, which for fsdp2 is gloo. The first variants
have the same bits, which is checked.

With --memory each variant over gloo is in processes of its own, with more layers: printed is what
the member that needs most has of memory at the peak of a step, in MB, beyond the empty process, and
what all parameters are.
"""

import argparse
import ctypes
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from stratagem.common.process.process import tune_malloc  # noqa: E402
from stratagem.common.tensors.same_bytes import parameter_slice  # noqa: E402
from stratagem.worker.engine import Trainer, build_trainer  # noqa: E402
from stratagem.worker.engine.slices import StateShare  # noqa: E402
from stratagem.worker.exchange import mesh_exchange, sliced_exchange  # noqa: E402
from stratagem.worker.user_code.entrypoints import EntryPoints  # noqa: E402

WIDTH, NUM_LAYERS, BATCH = 1024, 4, 96
ENGINES = ("shm", "gloo")
KINDS = ("replicated", "slices", "mirror", "full", "full-mirror")
VARIANTS = (*(f"{kind} {engine}" for engine in ENGINES for kind in KINDS),)
FSDP = "fsdp2 gloo"
CPU = torch.device("cpu")


def build(num_layers: int = NUM_LAYERS) -> nn.Module:
    """4.2 M parameters."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))


def load() -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8 * BATCH, WIDTH, generator=generator)
    return {"train": (x, x.flip(1))}


def job_of(size: int, num_layers: int) -> JobSpec:
    return JobSpec.parse(
        {
            "name": "partition",
            "model": {
                "entrypoint": "benchmarks.partition:build",
                "kwargs": {"num_layers": num_layers},
            },
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

    def state(self) -> dict[str, Tensor]:
        """Whole parameters, or slices of them."""
        assert self.trainer is not None
        return self.trainer.copy_state()[0]


def local(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def make(variant: str, setup: Setup, num_layers: int = NUM_LAYERS) -> Variant:
    if variant == FSDP:
        return make_fsdp(setup, num_layers)
    kind, engine = variant.split()
    spec, allowed = job_of(setup.size, num_layers), EntryPoints(["benchmarks.partition:*"])
    link = form(engine, setup)
    if kind == "replicated":
        trainer = build_trainer(spec, allowed, device=CPU, fresh=True)
        exchange = mesh_exchange(trainer.buckets, link, setup.size)
    else:
        is_full, is_mirrored = kind.startswith("full"), kind.endswith("mirror")
        share = StateShare(setup.rank, setup.size, is_mirrored, is_full)
        trainer = build_trainer(spec, allowed, share, device=CPU, fresh=True)
        assert trainer.pieces is not None
        owners = trainer.pieces.owners
        exchange = sliced_exchange(
            *(trainer.buckets, link, setup.size, owners),
            is_mirrored=is_mirrored,
            held=trainer.pieces.held,
        )
        trainer.connect(exchange)
    own = range(setup.rank, setup.rank + 1)
    return Variant(
        lambda: trainer.train_step(exchange, own, setup.size), trainer.optimizer, trainer
    )


def make_fsdp(setup: Setup, num_layers: int) -> Variant:
    torch.manual_seed(0)
    model, mesh = build(num_layers), init_device_mesh("cpu", (setup.size,))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
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
    ours = [each.state() for each in made.values() if each.trainer is not None]
    same = all(are_alike(ours[0], other) for other in ours)
    pipe.send(({name: each.moments_mb() for name, each in made.items()}, same))
    pipe.recv()
    os._exit(0)  # groups of three kinds are alive


def are_alike(whole: dict[str, Tensor], state: dict[str, Tensor]) -> bool:
    """Whether a state has the parameters of another one, as a whole or in slices."""
    for name, tensor in state.items():
        place = parameter_slice(name)
        if place is None and not name.startswith("model/"):
            continue
        expected = whole[name if place is None else place.whole].view(-1)
        first = 0 if place is None else place.first
        if not torch.equal(tensor.view(-1), expected[first : first + tensor.numel()]):
            return False
    return True


# ---- memory ----


def run_alone(pipe: Connection, rank: int, size: int, args: argparse.Namespace) -> None:
    tune_malloc()
    torch.set_num_threads(1)
    store = FileStore(args.store, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    empty = resident("VmRSS")
    made = make(args.variant, Setup("", rank, size, pipe), args.layers)
    for _ in range(args.warmup):
        made.step()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(args.steps):
        made.step()
    pipe.send(resident("VmHWM") - empty)
    pipe.recv()
    os._exit(0)


def resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) << 10


def measure_memory(size: int, args: argparse.Namespace) -> None:
    for args.variant in [*(f"{kind} gloo" for kind in KINDS), FSDP]:
        with members(run_alone, size, args) as pipes:
            if args.variant != FSDP:
                connect(pipes)
            peak = max(pipe.recv() for pipe in pipes)
            for pipe in pipes:
                pipe.send(None)
        whole = args.layers * WIDTH * (WIDTH + 1) * 4
        print(f"{size} {args.variant:<21} {peak / 1e6:7.1f} MB of {whole / 1e6:.1f}", flush=True)


# ---- the members ----


@contextmanager
def members(
    run: Callable[[Connection, int, int, argparse.Namespace], None],
    size: int,
    args: argparse.Namespace,
) -> Iterator[list[Connection]]:
    """Starts all members; yields a pipe to each."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="stratagem-benchmark-") as folder:
        args.store = f"{folder}/store"
        pipes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            context.Process(target=run, args=(theirs, rank, size, args), daemon=True).start()
            pipes.append(ours)
        yield pipes


def connect(pipes: list[Connection]) -> None:
    """Tells all members the addresses that they offer for one variant."""
    addresses = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)


def measure(size: int, args: argparse.Namespace) -> None:
    with members(run_member, size, args) as pipes:
        for _ in [name for name in args.variants if name != FSDP]:
            connect(pipes)
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
        print(f"{size} {name:<21} {moments:6.1f} MB {times[name]!s} {slower:.2f}")
    print("bits equal" if all(same for _, same in ends) else "OTHER BITS", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--steps", type=int, default=2, help="steps per round and variant")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--layers", type=int, default=16, help="with --memory")
    args = parser.parse_args()
    args.variants = [*VARIANTS, FSDP]
    if args.memory:
        for size in args.members:
            measure_memory(size, args)
        return
    print("N variant             moments    median    min    CPU ms / replicated")
    for size in args.members:
        measure(size, args)


if __name__ == "__main__":
    main()
