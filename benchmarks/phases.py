"""What phase training saves until the same validation loss, against the same job without phases.

    python benchmarks/phases.py --seeds 5
    python benchmarks/phases.py --seeds 5 --rates --only "whole data"

One process and one thread trains each job alone, without phases first. The loss to reach is what
that run ends with; the others may take half as many steps again, and "–" says that the median did
not get there. Passes are forward and backward together; a predicted step has neither, and sends no
gradient, so bytes go with passes. Seconds are of steps, without evaluations. All are ratios to the
run without phases, medians over seeds. The control has no phases but steps half as long again:
where it wins as much, the job was short of step length and not of gradients.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from stratagem.common.job import JobSpec  # noqa: E402
from stratagem.worker.engine import Trainer, build_trainer  # noqa: E402
from stratagem.worker.exchange import GradientBuckets, solo_exchange  # noqa: E402
from stratagem.worker.user_code.entrypoints import EntryPoints  # noqa: E402

ALLOWED = EntryPoints(["examples.*:*", "benchmarks.phases:*"])
SGD = {"name": "sgd", "lr": 0.1}
# The mean of eight gradients instead of a line, and gates that let noise through.
SMOOTHING = {
    "max_relative_error": 1.2,
    "min_correlation": 0.2,
    "predictor": {"history": 8, "damping": 0.0},
}
CONTROL = "lr × 1.5"
WITHOUT_AND_WITH: tuple[dict[str, Any], ...] = ({}, {"phases": {}})
RATES = (1.0, 1.5, 3.0, 6.0, 9.0)
WAYS: dict[str, dict[str, Any]] = {
    "defaults": {"phases": {}},
    "smoothing": {"phases": SMOOTHING},
    CONTROL: {},
}


def bowl() -> nn.Module:
    """One weight per direction, beginning at 1."""
    return Bowl()


class Bowl(nn.Module):
    """½·Σ qᵢ·wᵢ² as the mean squared error of a linear model without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights


def directions() -> dict[str, tuple[Tensor, Tensor]]:
    """Orthogonal rows: curvatures from 0.005 to 1 at step length 0.1 are q of 0.0005 to 0.1."""
    x = torch.diag(torch.logspace(-2.3, 0, 16).mul(8).sqrt())
    return {"train": (x, torch.zeros(16)), "test": (x, torch.zeros(16))}


def job(model: str, data: str, loss: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": "phases",
        "model": {"entrypoint": model, "kwargs": changes.pop("kwargs", {})},
        "data": {"entrypoint": data, "kwargs": changes.pop("rows", {})},
        "loss": loss,
        "optimizer": SGD,
        "evaluation": {"split": "test"},
        **changes,
    }


CNN = ("examples.digits:build_cnn", "examples.digits:load", "cross_entropy")
MLP = ("examples.digits:build_model", "examples.digits:load", "cross_entropy")
TEXT = ("examples.charlm:build_model", "examples.charlm:load", "token_cross_entropy")
SMALL_TEXT: dict[str, Any] = {
    "kwargs": {"width": 32, "num_blocks": 1},
    "rows": {"context": 32, "num_chars": 60_000},
}
CALM: dict[str, Any] = {"kwargs": {"channels": 8, "dropout": 0.0}}

TASKS: dict[str, dict[str, Any]] = {
    "quadratic bowl": job(
        "benchmarks.phases:bowl", "benchmarks.phases:directions", "mse", steps=600, batch_size=16
    ),
    "digits MLP, whole data": job(*MLP, steps=400, batch_size=1437),
    "digits MLP, batch 64": job(*MLP, steps=300, batch_size=64),
    "digits CNN, whole data": job(*CNN, steps=80, batch_size=1437, **CALM),
    "digits CNN, batch 64": job(*CNN, steps=200, batch_size=64, **CALM),
    "charlm, batch 32": job(*TEXT, steps=200, batch_size=32, **SMALL_TEXT),
    "charlm, batch 32, adamw": job(
        *TEXT, steps=200, batch_size=32, optimizer={"name": "adamw", "lr": 0.003}, **SMALL_TEXT
    ),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A run so far, at one of its evaluations."""

    steps: int
    passes: int
    seconds: float
    loss: float


def run(document: dict[str, Any], seed: int, num_steps: int, every: int) -> Iterator[Point]:
    spec = JobSpec.parse({**document, "seed": seed})
    trainer = build_trainer(spec, ALLOWED, device=torch.device("cpu"), fresh=True)
    exchange = solo_exchange(GradientBuckets(trainer.params, num_extras=trainer.num_extras), 1)
    passes, seconds = 0, 0.0
    while trainer.step < num_steps:
        began = time.perf_counter()
        report = trainer.train_step(exchange, range(1), 1)
        seconds += time.perf_counter() - began
        passes += report.phase != "PREDICT"
        if trainer.step % every == 0:
            yield Point(trainer.step, passes, seconds, validation_loss(trainer))


def validation_loss(trainer: Trainer) -> float:
    evaluator = trainer.evaluator()
    parts = [evaluator.part(*batch) for batch in evaluator.share(["test"], 0, 1)]
    return sum(part.sums["loss"] for part in parts) / sum(part.weight for part in parts)


def until(points: Iterator[Point], loss: float) -> Point | None:
    return next((point for point in points if point.loss <= loss), None)


def compare(document: dict[str, Any], seed: int) -> dict[str, tuple[float, ...]]:
    """By way: (steps, passes, seconds) per those without; infinite where it did not get there."""
    num_steps, every = document["steps"], max(1, document["steps"] // 100)
    plain = list(run(document, seed, num_steps, every))[-1]
    ratios: dict[str, tuple[float, ...]] = {}
    for way, changes in WAYS.items():
        longer = {**document, "steps": num_steps * 3 // 2, **changes}
        if way == CONTROL:
            rate = document["optimizer"]["lr"] * 1.5
            longer["optimizer"] = {**document["optimizer"], "lr": rate}
        found = until(run(longer, seed, num_steps * 3 // 2, every), plain.loss)
        ratios[way] = (math.inf, math.inf, math.inf)
        if found is not None:
            ratios[way] = (
                found.steps / plain.steps,
                found.passes / plain.passes,
                found.seconds / plain.seconds,
            )
    return ratios


def passes_by_rate(document: dict[str, Any], seed: int) -> list[tuple[float, float]]:
    """For each of RATES: passes (without, with) phases to the loss that the job ends with, per its
    own; infinite where it did not get there."""
    num_steps, every = document["steps"], max(1, document["steps"] // 100)
    goal = list(run(document, seed, num_steps, every))[-1].loss
    found = []
    for factor in RATES:
        rate = document["optimizer"]["lr"] * factor
        faster = {**document, "optimizer": {**document["optimizer"], "lr": rate}}
        reached = [
            until(run({**faster, **way}, seed, num_steps * 3 // 2, every), goal)
            for way in WITHOUT_AND_WITH
        ]
        plain, phased = (each.passes / num_steps if each else math.inf for each in reached)
        found.append((plain, phased))
    return found


def print_rates(name: str, document: dict[str, Any], num_seeds: int) -> None:
    by_seed = [passes_by_rate(document, seed) for seed in range(num_seeds)]
    for number, factor in enumerate(RATES):
        plain, phased = (statistics.median(each[number][way] for each in by_seed) for way in (0, 1))
        print(f"{name:30} lr × {factor:<4} {plain:8.2f} without {phased:8.2f} with", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--rates", action="store_true", help="passes at other learning rates")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rates:
        for name, document in TASKS.items():
            if options.only in name:
                print_rates(name, document, options.seeds)
        return
    print(f"{'job':30} {'phases':10} {'steps':>8} {'passes':>8} {'seconds':>8}   with / without")
    for name, document in TASKS.items():
        if options.only not in name:
            continue
        compared = [compare(document, seed) for seed in range(options.seeds)]
        for way in WAYS:
            rows = [ratios[way] for ratios in compared]
            medians = [statistics.median(values) for values in zip(*rows, strict=True)]
            cells = " ".join(f"{each:8.2f}" if each < math.inf else f"{'–':>8}" for each in medians)
            print(f"{name:30} {way:10} {cells}", flush=True)


if __name__ == "__main__":
    main()
