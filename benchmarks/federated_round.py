"""Seconds per federated round without training, and the coordinator's memory.

    python benchmarks/federated_round.py --mb 4 40 --clients 2 8 32 --rounds 12

The model is one frozen parameter of the size asked for beside a trained one of one element, so a
round is its transport: broadcast, two model-sized transfers per client, checks, fold, commits. The
whole system runs: coordinator and two worker processes over loopback, durable journal and store.
Medians over rounds after the first two. CPU is that of all three processes, per round: on a busy
machine it says more than the seconds. The floor is `benchmarks/federated_floor.py`: transport and
disk of such a round with two clients, written by hand. Memory is the peak resident size of the
coordinator above what it had after a run whose model is nothing, in units of the model: what any
first run brings in is not the model's.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
NUM_WARMUP_ROUNDS = 2


class Ballast(nn.Module):
    """Big in transport, nothing to train."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        part = num_elements // 10
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.zeros(part), requires_grad=False) for _ in range(10)
        )
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def build_model(num_elements: int) -> nn.Module:
    return Ballast(num_elements)


def load() -> dict[str, tuple[Tensor, Tensor]]:
    return {"train": (torch.ones(64, 1), torch.ones(64, 1))}


def job(num_elements: int, num_clients: int, rounds: int) -> dict[str, object]:
    return {
        "name": "ballast",
        "model": {
            "entrypoint": "benchmarks.federated_round:build_model",
            "kwargs": {"num_elements": num_elements},
        },
        "data": {"entrypoint": "benchmarks.federated_round:load"},
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.01},
        "batch_size": 64,
        "partition": {"method": "contiguous"},
        "strategy": {
            "type": "Federated",
            "num_clients": num_clients,
            "rounds": rounds,
            "aggregation": {"method": "FedAvg"},
            "client_selection": {"method": "All"},
        },
    }


def resident_bytes(pid: int, field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} for {pid}")


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pids: list[int]) -> float:
    """User and system seconds of some processes so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in stats) / os.sysconf("SC_CLK_TCK")


def measure(mb: int, num_clients: int, rounds: int) -> tuple[float, float, float, float, float]:
    """Median, minimum, maximum and CPU seconds per round; peak memory in models above idle."""
    from stratagem.client import LocalCluster

    num_elements = mb * 1_000_000 // 4
    allow = ("benchmarks.federated_round:*",)
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(workers=2, data_dir=Path(folder), allow=allow, import_path=(ROOT,))
        with cluster, cluster.client() as client:
            pids = {name: cast(int, p.pid) for name, p in cluster.processes.items()}
            pid = pids["coordinator"]
            client.submit(job(10, num_clients, NUM_WARMUP_ROUNDS)).result()
            before = resident_bytes(pid, "VmRSS")
            reset_peak(pid)
            run = client.submit(job(num_elements, num_clients, rounds))
            events = watched(run, [*pids.values()])
            peak = resident_bytes(pid, "VmHWM") - before
    times, used = zip(*events, strict=True)
    gaps = [after - before for before, after in pairwise(times)][NUM_WARMUP_ROUNDS:]
    cpu = (used[-1] - used[NUM_WARMUP_ROUNDS]) / (rounds - NUM_WARMUP_ROUNDS - 1)
    return statistics.median(gaps), min(gaps), max(gaps), cpu, peak / (mb * 1e6)


def watched(run: Any, pids: list[int]) -> list[tuple[float, float]]:
    """When each round was committed, and the CPU seconds used until then."""
    return [
        (event.time_s, cpu_s(pids))
        for event in run.watch()
        if getattr(event, "kind", "") == "SegmentCommitted"
    ]


def floor(mb: int, rounds: int) -> str:
    """The row of `federated_floor.py`, which tunes malloc for its own process."""
    script = Path(__file__).with_name("federated_floor.py")
    command = [sys.executable, str(script), "--mb", str(mb), "--rounds", str(rounds)]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, nargs="+", default=[4, 40])
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    columns = ("s/round", "min", "max", "CPU s")
    print(f"{'model':>8} {'clients':>8}", *(f"{each:>8}" for each in columns), f"{'peak':>14}")
    for mb in args.mb:
        print(floor(mb, args.rounds), flush=True)
        for num_clients in args.clients:
            median, least, most, cpu, models = measure(mb, num_clients, args.rounds)
            print(
                f"{mb:>5} MB {num_clients:>8}",
                *(f"{each:>8.4f}" for each in (median, least, most, cpu)),
                f"{models:>7.2f} models",
                flush=True,
            )


if __name__ == "__main__":
    main()
