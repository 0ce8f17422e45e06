"""Many simulated clients on two workers: seconds per round and memory of all processes.

    python benchmarks/federated_clients.py --clients 100 1000 --rounds 4

A perceptron of 0.2 MB, 20 rows per client, one local epoch: what is measured is the price of a
client, not of its training. The whole system runs, with durable journal and store. Memory is the
peak resident size above what the process had before the run; it should not grow with the clients.
"""

import argparse
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
ROWS_PER_CLIENT = 20
NUM_FEATURES, NUM_CLASSES = 64, 10


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NUM_FEATURES, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def load(num_rows: int) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, NUM_FEATURES, generator=generator)
    return {"train": (x, x[:, :NUM_CLASSES].argmax(1))}


def job(num_clients: int, rounds: int, method: str) -> dict[str, object]:
    return {
        "name": "many",
        "model": {"entrypoint": "benchmarks.federated_clients:build_model"},
        "data": {
            "entrypoint": "benchmarks.federated_clients:load",
            "kwargs": {"num_rows": num_clients * ROWS_PER_CLIENT},
        },
        "loss": "cross_entropy",
        "optimizer": {"name": "sgd", "lr": 0.1},
        "batch_size": 10,
        "partition": {"method": method},
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


def measure(num_clients: int, rounds: int, method: str) -> tuple[list[float], dict[str, float]]:
    """Seconds of each round; peak MB above idle by process."""
    from stratagem.client import Event, LocalCluster

    allow = ("benchmarks.federated_clients:*",)
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(workers=2, data_dir=Path(folder), allow=allow, import_path=(ROOT,))
        with cluster, cluster.client() as client:
            pids: dict[str, Any] = {name: p.pid for name, p in cluster.processes.items()}
            before = {name: resident_bytes(pid, "VmRSS") for name, pid in pids.items()}
            run = client.submit(job(num_clients, rounds, method))
            events = [e for e in run.watch() if isinstance(e, Event)]
            run.result()
            peaks = {
                name: (resident_bytes(pid, "VmHWM") - before[name]) / 1e6
                for name, pid in pids.items()
            }
    kinds = ("RosterFormed", "SegmentCommitted")
    times = [e.time_s for e in events if e.kind in kinds]
    return [after - before for before, after in pairwise(times)], peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--partition", default="by_label")
    args = parser.parse_args()
    print(f"{'clients':>8} {'s/round':>8} {'first':>8} {'ms/client':>10}  peak MB above idle")
    for num_clients in args.clients:
        gaps, peaks = measure(num_clients, args.rounds, args.partition)
        median = statistics.median(gaps[1:] or gaps)
        print(
            f"{num_clients:>8} {median:>8.3f} {gaps[0]:>8.3f} {median / num_clients * 1e3:>10.2f} ",
            ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
