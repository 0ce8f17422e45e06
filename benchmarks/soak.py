"""What many uploads and many runs leave behind: memory, descriptors, threads and bytes on disk.

    python benchmarks/soak.py --minutes 6
    python benchmarks/soak.py --uploads 1000 --runs 200

The whole system runs: coordinator and two worker processes over loopback, everything durable.
Uploads are the updates of federated rounds (40 MB each, `--mb`), pulled into the spool and folded.
Runs are tiny real trainings of every kind, one after another, and every fifth time four at once.
Both halves end early when the time is up; the table says how much was done. At the end the
coordinator is started again, which shows what of its memory is its state. The slope is the median
over all pairs of samples of the second half (Theil and Sen), per 100 uploads or runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from stratagem.client import Client, LocalCluster

ROOT = Path(__file__).resolve().parent.parent
PERIOD_S = 0.5
NUM_CLIENTS = 10
NUM_ROUNDS = 5
MAX_PAIRED = 150
"""Samples that the slope pairs with each other at most."""

Job = dict[str, Any]


# ---- what the workers train ----


class Ballast(nn.Module):
    """Big in transport, nothing to train but one weight."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(num_elements), requires_grad=False)
        self.weight = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def build_ballast(num_elements: int) -> nn.Module:
    return Ballast(num_elements)


def build_tiny(hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def load() -> dict[str, tuple[Tensor, Tensor]]:
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    return {"train": (x, x), "test": (x[:8], x[:8])}


def upload_job(num_elements: int, seed: int) -> Job:
    """NUM_CLIENTS * NUM_ROUNDS uploads; with every seed the states are others."""
    strategy = {
        "type": "Federated",
        "num_clients": NUM_CLIENTS,
        "rounds": NUM_ROUNDS,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
    }
    return _job("build_ballast", strategy, num_elements=num_elements) | {"seed": seed}


def run_jobs() -> list[Job]:
    """One short job of each kind; the last one is stopped before its end."""
    exchanges = ({"method": "AllReduce"}, {"method": "ParameterServer"})
    parallel = [
        {"type": "DataParallel", "num_replicas": 2, "aggregation": each} for each in exchanges
    ]
    federated: dict[str, Any] = {
        "type": "Federated",
        "num_clients": 2,
        "rounds": 2,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
    }
    local: dict[str, Any] = {"type": "Local"}
    return [_job("build_tiny", each) for each in (local, *parallel, federated, local)]


def _job(model: str, strategy: Job, **kwargs: int) -> Job:
    document: Job = {
        "name": "soak",
        "model": {"entrypoint": f"benchmarks.soak:{model}", "kwargs": kwargs},
        "data": {"entrypoint": "benchmarks.soak:load"},
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.01},
        "batch_size": 16,
        "strategy": strategy,
    }
    if strategy["type"] == "Federated":
        return document
    every = {"split": "test", "every": "4 steps"}
    return document | {"steps": 12, "evaluation": every}


# ---- samples ----


@dataclass(frozen=True, slots=True)
class Sample:
    """How things stood when `done` uploads or runs had ended; a value per column."""

    done: int
    values: dict[str, float]


@dataclass(slots=True)
class Sampler:
    """Looks at a cluster's processes and folders twice a second, from a thread of its own."""

    cluster: LocalCluster
    done: int = 0
    samples: list[Sample] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()
        self.look()

    def look(self) -> None:
        self.samples.append(Sample(self.done, measure(self.cluster)))

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self.look()


def measure(cluster: LocalCluster) -> dict[str, float]:
    """Anonymous memory in MB, descriptors and threads of each process; MB on disk of each part."""
    values: dict[str, float] = {}
    for name, view in cluster.processes.items():
        if view.pid is None:
            continue
        status = status_of(view.pid)
        if not status:
            continue
        values[f"{name} MB"] = status["RssAnon"] / 1024
        values[f"{name} fds"] = sum(1 for _ in Path(f"/proc/{view.pid}/fd").iterdir())
        values[f"{name} threads"] = status["Threads"]
    data = cluster.folder / "coordinator"
    for part in ("journal.sqlite*", "blobs", "spool", "logs"):
        values[f"{part.partition('.')[0]} MB on disk"] = _bytes_of(data, part) / 1e6
    values["workers MB on disk"] = _bytes_of(cluster.folder, "worker-*") / 1e6
    return values


def status_of(pid: int) -> dict[str, int]:
    """The numbers of /proc/<pid>/status; empty when the process has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    pairs = (line.partition(":") for line in lines)
    numbers = {key: rest.split() for key, _, rest in pairs}
    return {key: int(words[0]) for key, words in numbers.items() if words and words[0].isdigit()}


def _bytes_of(folder: Path, pattern: str) -> int:
    """Return the bytes of all files there. They come and go meanwhile, and so do their folders,
    which `os.walk` leaves out when they are gone."""
    total = 0
    for top in folder.glob(pattern):
        inside = (Path(place, name) for place, _, names in os.walk(top) for name in names)
        for path in (top, *inside):
            try:
                total += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue
    return total


def slope(samples: Sequence[Sample], column: str) -> float:
    """Change of a column per 100 done, over the second half: the median of all pairs."""
    half = [each for each in samples if each.done >= samples[-1].done / 2 and column in each.values]
    step = max(1, len(half) // MAX_PAIRED)
    pairs = combinations(half[::step], 2)
    rises = [
        (b.values[column] - a.values[column]) / (b.done - a.done)
        for a, b in pairs
        if b.done > a.done
    ]
    return 100 * statistics.median(rises) if rises else 0.0


# ---- the work ----


def uploads(client: Client, mb: float) -> Iterator[int]:
    """Federated runs one after another; yields how many uploads have been folded."""
    done = 0
    while True:
        run = client.submit(upload_job(int(mb * 250_000), seed=done))
        for item in run.watch():
            if getattr(item, "kind", "") == "SegmentCommitted":
                done += NUM_CLIENTS
                yield done
        run.result()


def runs(client: Client) -> Iterator[int]:
    """Runs of all kinds; yields how many have ended."""
    jobs, done, turn = run_jobs(), 0, 0
    while True:
        several = 4 if turn % 5 == 4 else 1
        handles = [client.submit(jobs[(turn + n) % len(jobs)]) for n in range(several)]
        if turn % len(jobs) == len(jobs) - 1:
            handles[0].cancel()
        for handle in handles:
            for _ in handle.watch():
                pass
        list(handles[0].logs())
        turn, done = turn + 1, done + several
        yield done


def soak(cluster: LocalCluster, work: Iterator[int], goal: int, deadline_s: float) -> list[Sample]:
    """Work until the goal or the deadline; what was seen meanwhile."""
    with Sampler(cluster) as sampler:
        for done in work:
            sampler.done = done
            if done >= goal or time.monotonic() >= deadline_s:
                break
    return sampler.samples


# ---- words ----


def table(samples: Sequence[Sample], what: str) -> str:
    """Start, quarter, half, end and slope of every column."""
    total = samples[-1].done
    marks: list[Callable[[Sample], bool]] = [
        lambda _: True,
        lambda each: each.done >= total / 4,
        lambda each: each.done >= total / 2,
    ]
    rows = [*(next(filter(mark, samples)) for mark in marks), samples[-1]]
    head = ["", *(f"{row.done}" for row in rows), f"per 100 {what}"]
    body = []
    for column in samples[-1].values:
        cells = [f"{row.values.get(column, 0.0):.1f}" for row in rows]
        body.append([column, *cells, f"{slope(samples, column):+.2f}"])
    widths = [max(len(line[n]) for line in (head, *body)) for n in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if not n else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (head, *body)
    ]
    return "\n".join(lines)


def main() -> None:
    from stratagem.client import LocalCluster

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.5, help="of work, both halves together")
    parser.add_argument("--uploads", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--mb", type=float, default=40.0, help="of one upload")
    args = parser.parse_args()
    half_s = 30 * args.minutes
    cluster = LocalCluster(workers=2, threads=1, allow=("benchmarks.soak:*",), import_path=(ROOT,))
    with cluster, cluster.client() as client:
        began_s = time.monotonic()
        for what, work, goal in (
            ("uploads", uploads(client, args.mb), args.uploads),
            ("runs", runs(client), args.runs),
        ):
            began_s = time.monotonic()
            seen = soak(cluster, work, goal, began_s + half_s)
            print(f"{seen[-1].done} {what} in {time.monotonic() - began_s:.0f} s", flush=True)
            print(table(seen, what), flush=True)
        num_starts = cluster.processes["coordinator"].num_starts
        cluster.kill("coordinator")
        cluster.wait_restarted("coordinator", num_starts)
        client.runs()
        again = measure(cluster)
        kept = {name: again[name] for name in again if name.startswith(("coordinator", "blobs"))}
        print("the coordinator started again:", {k: round(v, 1) for k, v in kept.items()})


if __name__ == "__main__":
    main()
