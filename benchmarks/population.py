"""Seconds per generation of a population with a trivial step, and from command to end.

    python benchmarks/population.py --population 4 --generations 10

The whole system runs: coordinator and two worker processes over loopback, every member's state
durable after every generation. Per generation: median over those after the first two. From command
to end: `stratagem run` as a user types it, cluster start included, median of --repeats.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
NUM_WARMUP_GENERATIONS = 2


def build_model() -> nn.Module:
    return nn.Linear(4, 1)


def load() -> dict[str, tuple[Tensor, Tensor]]:
    x = torch.arange(256, dtype=torch.float32).reshape(64, 4) / 256
    return {"train": (x, x.sum(1, keepdim=True)), "test": (x[:16], x[:16].sum(1, keepdim=True))}


def job(population: int, generations: int) -> dict[str, object]:
    return {
        "name": "population",
        "model": {"entrypoint": "benchmarks.population:build_model"},
        "data": {"entrypoint": "benchmarks.population:load"},
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.01},
        "batch_size": 64,
        "search_space": {"optimizer.lr": {"low": 0.001, "high": 0.1, "scale": "log"}},
        "steps_per_generation": 1,
        "evaluation": {"split": "test", "best": "loss", "mode": "min"},
        "strategy": {
            "type": "PopulationBased",
            "population_size": population,
            "generations": generations,
            "exploit": {"method": "Truncation", "fraction": 0.25},
            "explore": {"method": "Perturbation", "factor": 0.2},
        },
    }


def generation_seconds(population: int, generations: int) -> list[float]:
    """Gaps between the ends of generations, warm-up left out."""
    from stratagem.client import Event, LocalCluster

    allow = ("benchmarks.population:*",)
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(workers=2, data_dir=Path(folder), allow=allow, import_path=(ROOT,))
        with cluster, cluster.client() as client:
            run = client.submit(job(population, generations))
            run.result()
            events = [e for e in run.watch() if isinstance(e, Event)]
            times = [e.time_s for e in events if e.kind == "GenerationClosed"]
    return [after - before for before, after in pairwise(times)][NUM_WARMUP_GENERATIONS:]


def command_seconds(population: int, generations: int) -> float:
    """`stratagem run --local 2` from start to exit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job(population, generations)))
        command = [str(Path(sys.executable).with_name("stratagem")), "run", str(path)]
        began = time.perf_counter()
        subprocess.run(
            [*command, "--local", "2", "--data-dir", f"{folder}/data"],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--population", type=int, default=4)
    parser.add_argument("--generations", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    gaps = generation_seconds(args.population, args.generations)
    print(
        f"{args.population} members: {statistics.median(gaps):.4f} s per generation "
        f"(min {min(gaps):.4f}, max {max(gaps):.4f}, {len(gaps)} generations)"
    )
    ends = [command_seconds(args.population, args.generations) for _ in range(args.repeats)]
    print(f"command to end, {args.generations} generations: {statistics.median(ends):.2f} s")


if __name__ == "__main__":
    main()
