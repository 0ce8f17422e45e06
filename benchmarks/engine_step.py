"""Step time of the engine against a plain torch loop, with and without gradient accumulation.

    python benchmarks/engine_step.py --rounds 40

One process, one thread, solo exchange, so what is left is what the engine itself costs: keyed
randomness, gathering rows, hooks and buckets, the check for finite numbers, buffers, extras. The
variants take turns inside one run; "x4" computes each batch as four micro-batches. Printed are
median wall and CPU time per step, and the medians of the per-round ratios to the plain loop of the
same kind. The loop reads no loss and checks nothing, and its optimizer is torch's default; "fused"
updates in one pass, as the engine does; "checked" also does what every real one does: read the
loss, and stop at a gradient that is not finite.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers.training import Transformer
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.process.process import tune_malloc
from stratagem.worker.data.datasets import Gather, as_dataset
from stratagem.worker.engine.setup import Setup
from stratagem.worker.engine.trainer import Trainer
from stratagem.worker.exchange import SingleMemberReducer
from stratagem.worker.numerics.model import prepare
from stratagem.worker.numerics.randomness import KeyedRandomness
from stratagem.worker.objectives.evaluator import Evaluator
from stratagem.worker.objectives.step_function import make_objective
from stratagem.worker.user_code.entrypoints import EntryPoints

NUM_MICRO_BATCHES = 4
ROWS = {"mlp": 32, "transformer": 8}
STEPS = {"mlp": 100, "transformer": 1}
CPU = torch.device("cpu")


def make_model(name: str) -> nn.Module:
    """10 M parameters, or 10 k."""
    torch.manual_seed(0)
    if name == "transformer":
        return nn.Sequential(Transformer())
    return nn.Sequential(
        nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 40), nn.ReLU(), nn.Linear(40, 10)
    )


def make_data(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = 64 * ROWS[name]
    if name == "transformer":
        tokens = torch.randint(10_000, (rows, 33), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return torch.randn(rows, 32, generator=generator), torch.randint(10, (rows,))


def plain(
    name: str, *, num_parts: int, is_checked: bool = False, fused: bool | None = None
) -> Callable[[], None]:
    """The loop that everybody writes."""
    model, (x, y) = make_model(name), make_data(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=fused)
    loss_of, rows = nn.CrossEntropyLoss(), ROWS[name]
    order: list[Tensor] = []

    def step() -> None:
        if not order:
            order.extend(torch.randperm(len(x)).split(rows))
        optimizer.zero_grad()
        total = 0.0
        for part in order.pop().split(rows // num_parts):
            target = y[part].flatten() if y.dim() > 1 else y[part]
            loss = loss_of(model(x[part]), target)
            if num_parts > 1:
                loss = loss / num_parts
            loss.backward()
            if is_checked:
                total += loss.item()
        if is_checked:
            norm = nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            )
            assert math.isfinite(total)
            assert math.isfinite(norm.item())
        optimizer.step()

    return step


def engine(name: str, *, num_parts: int) -> Callable[[], None]:
    """A real trainer."""
    job = JobSpec.parse(
        {
            "name": name,
            "model": {"entrypoint": "benchmarks:model"},
            "data": {"entrypoint": "benchmarks:data"},
            "loss": "token_cross_entropy" if name == "transformer" else "cross_entropy",
            "optimizer": {"name": "sgd", "lr": 1e-3, "momentum": 0.9},
            "steps": 1_000_000,
            "batch_size": ROWS[name],
            **({"accumulation": {"steps": num_parts}} if num_parts > 1 else {}),
        }
    )
    model, gather = make_model(name), Gather(torch.float32, CPU)
    objective = make_objective(job, EntryPoints([]))
    randomness = KeyedRandomness(model, CPU)
    data = {"train": as_dataset(make_data(name), "train")}
    execution = prepare(model, job, CPU, randomness)
    evaluator = Evaluator(model, data, execution, randomness, gather, objective, {}, 256)
    setup = Setup(
        *(job, model, data, objective, gather, evaluator, randomness, execution),
        numerics=CURRENT,
        entrypoints=EntryPoints([]),
    )
    trainer = Trainer(setup)
    exchange = SingleMemberReducer(trainer.params)
    return lambda: void(trainer.train_step(exchange, range(1), 1))


def void(_: object) -> None:
    """Nothing."""


@dataclass
class Times:
    """Seconds per step, by round."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def measure(name: str, args: argparse.Namespace) -> dict[str, Times]:
    """By variant."""
    parts = NUM_MICRO_BATCHES
    steps = {
        "torch": plain(name, num_parts=1),
        "fused": plain(name, num_parts=1, fused=True),
        "checked": plain(name, num_parts=1, is_checked=True),
        "engine": engine(name, num_parts=1),
        f"torch x{parts}": plain(name, num_parts=parts),
        f"fused x{parts}": plain(name, num_parts=parts, fused=True),
        f"checked x{parts}": plain(name, num_parts=parts, is_checked=True),
        f"engine x{parts}": engine(name, num_parts=parts),
    }
    times = {variant: Times() for variant in steps}
    variants = list(steps)
    for round_num in range(-1, args.rounds):
        turn = round_num % len(steps)
        for variant in variants[turn:] + variants[:turn]:
            step = steps[variant]
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(args.steps or STEPS[name]):
                step()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if round_num >= 0:
                times[variant].wall_s.append(wall / (args.steps or STEPS[name]))
                times[variant].cpu_s.append(cpu / (args.steps or STEPS[name]))
    return times


def ratio(own: list[float], other: list[float]) -> float:
    """Median of the ratios per round."""
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "transformer"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=0, help="per round and variant")
    args = parser.parse_args()
    tune_malloc()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; ms per step")
    print(f"{'model':<12} {'':<10} {'wall':>8} {'CPU':>8}  / torch, / fused, / checked (each CPU)")
    for name in args.models:
        times = measure(name, args)
        for variant, own in times.items():
            _, _, suffix = variant.partition(" ")
            cells = []
            for base in ("torch", "fused", "checked"):
                other = times[f"{base} {suffix}".strip()]
                wall, cpu = ratio(own.wall_s, other.wall_s), ratio(own.cpu_s, other.cpu_s)
                cells.append(f"{wall:6.3f} ({cpu:.3f})")
            wall, cpu = statistics.median(own.wall_s), statistics.median(own.cpu_s)
            print(
                f"{name:<12} {variant:<10} {1e3 * wall:8.3f} {1e3 * cpu:8.3f} ", *cells, flush=True
            )


if __name__ == "__main__":
    main()
