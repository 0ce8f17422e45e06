"""What commits of a large state cost: whole ones, what has changed since the one before, and leaves
that the workers write by themselves.

    python benchmarks/commits.py --rounds 3
    python benchmarks/commits.py --rounds 2 --all --workers 2 --layers 4
    python benchmarks/commits.py --all --workers 2 --layers 15 --ways whole direct
    python benchmarks/commits.py --all --workers 2 --layers 15 --ways whole direct --slices

Workers train the last layer of a model whose other layers are frozen, or with --all every one, and
commit after every step. "Whole" is the same coordinator without a memory of what it was sent
before, "changed" the coordinator as it is, "direct" one with --state-path direct. With --slices
each of the workers has a slice of the optimizer's state, so it is put together of what all have;
then nothing is told from the commit before, and "changed" is the same as "whole". The ways take
turns, each with a cluster of its own. Printed per commit are medians, over the rounds, of the bytes
that the coordinator receives, of CPU seconds of the coordinator and of all workers (with the step:
the same in all), of seconds from the end of a segment to its commit, of seconds between commits, of
seconds for which training stood still on the worker where that was longest, and of the peaks of
memory of the coordinator and of the worker that needed the most.

The state has 67 MB for each layer, with --all twice that: 15 layers are 2 GB. Two workers need
about 16 GB of memory then, 13 with --slices, one 12; and the disk 10 GB.
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.federated_round import resident_bytes
from stratagem.client.course.views import Event
from stratagem.client.local.cluster import LocalCluster
from tests.common.observe.scrape import labelled
from tests.common.observe.scrape import scrape_process as scraped
from tests.jobs import document

ROOT = Path(__file__).parents[1]
WHOLE = "--without-bases"
WIDTH = 4096
NUM_FEATURES, NUM_CLASSES = 12, 5
NUM_COMMITS = 6
NUM_WARMUP_COMMITS = 1
STALL = "stratagem_worker_snapshot_stall_seconds"
STATES = labelled(direction="received", kind="state")
WAYS = ("whole", "changed", "direct")


def tuned(num_layers: int, *, trains_all: bool = False) -> nn.Module:
    """67 MB for each layer, which is frozen unless asked otherwise, and a head that trains."""
    body = [nn.Linear(NUM_FEATURES, WIDTH), nn.Tanh()]
    for _ in range(num_layers):
        body += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(
        nn.Sequential(*body).requires_grad_(trains_all), nn.Linear(WIDTH, NUM_CLASSES)
    )


class Costs(NamedTuple):
    """Of one commit; memory of all."""

    received_mb: float
    coordinator_cpu_s: float
    workers_cpu_s: float
    commit_s: float
    seconds: float
    stall_s: float
    coordinator_peak_mb: float
    worker_peak_mb: float


@dataclass(frozen=True, slots=True)
class Setup:
    num_workers: int
    num_layers: int
    trains_all: bool
    has_slices: bool
    mirror: int | None

    @property
    def job(self) -> dict[str, Any]:
        built = {"num_layers": self.num_layers, "trains_all": self.trains_all}
        return document(
            {"entrypoint": "benchmarks.commits:tuned", "kwargs": built},
            steps=NUM_COMMITS,
            checkpoint={"every": "1 steps"},
            retention=2,
            strategy={"type": "Local"} if self.num_workers == 1 else self.replicated,
        )

    @property
    def replicated(self) -> dict[str, Any]:
        options: dict[str, Any] = {"partition_state": "optimizer"} if self.has_slices else {}
        if self.mirror is not None:
            options["mirror"] = self.mirror
        return {
            "type": "DataParallel",
            "num_replicas": self.num_workers,
            "aggregation": {"method": "AllReduce"},
            "options": options,
        }


def measure(way: str, setup: Setup) -> Costs:
    program = [sys.executable, __file__, WHOLE] if way == "whole" else None
    programs = {"worker": [sys.executable, "-m", "stratagem.worker"]}
    programs["coordinator"] = program or [sys.executable, "-m", "stratagem.coordinator"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "STRATAGEM_COORDINATOR_METRICS_PORT": "0",
            "STRATAGEM_WORKER_METRICS_PORT": "0",
            # The state that workers begin from is in files: it would be one more in memory.
            "STRATAGEM_WORKER_MAX_BLOB_MEMORY_BYTES": "0",
        }
        if way == "direct":
            environment["STRATAGEM_COORDINATOR_STATE_PATH"] = "direct"
            environment["STRATAGEM_WORKER_STATE_FOLDER"] = f"{folder}/coordinator/states"
        cluster = LocalCluster(
            workers=setup.num_workers,
            threads=1,
            data_dir=Path(folder),
            allow=["benchmarks.*:*", "tests.userland.*:*"],
            import_path=(ROOT,),
            programs=programs,
            environment=environment,
        )
        with cluster, cluster.client() as client:
            pids = {name: cast(int, each.pid) for name, each in cluster.processes.items()}
            run = client.submit(setup.job)
            seen: list[tuple[float, ...]] = []
            finished_s: dict[int, float] = {}
            commits_s: list[float] = []
            for item in run.watch():
                if isinstance(item, Event) and item.kind == "SegmentFinished":
                    finished_s[item.payload["segment"]] = item.time_s
                if isinstance(item, Event) and item.kind == "SegmentCommitted":
                    commits_s.append(item.time_s - finished_s[item.payload["segment"]])
                    flows = scraped(cluster, "coordinator")["stratagem_stream_bytes_total"]
                    workers = sum(_cpu_s(pids[name]) for name in cluster.worker_names)
                    scrapes = [scraped(cluster, name) for name in cluster.worker_names]
                    stalls_s = [each[f"{STALL}_sum"][()] for each in scrapes]
                    cpu = _cpu_s(pids["coordinator"]), workers
                    seen.append((flows.get(STATES, 0.0) / 1e6, *cpu, item.time_s, *stalls_s))
            run.result()
            peaks = {name: resident_bytes(pid, "VmHWM") / 1e6 for name, pid in pids.items()}
    first, last = seen[NUM_WARMUP_COMMITS - 1], seen[-1]
    num = len(seen) - NUM_WARMUP_COMMITS
    received, coordinator, workers, seconds, *stalls = (
        (b - a) / num for a, b in zip(first, last, strict=True)
    )
    commit_s = statistics.median(commits_s[NUM_WARMUP_COMMITS:])
    largest = max(peaks[name] for name in cluster.worker_names)
    cpu = (coordinator, workers)
    return Costs(received, *cpu, commit_s, seconds, max(stalls), peaks["coordinator"], largest)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def coordinator_without_bases() -> None:
    """A coordinator that asks for all of each snapshot."""
    from stratagem.coordinator.effects import snapshot
    from stratagem.coordinator.process.main import main as run_coordinator

    async def none(transfers: Any, at: Any) -> Any:
        return None

    snapshot.base_of = none
    run_coordinator()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8, help="of 67 MB each")
    parser.add_argument("--all", action="store_true", help="all train, with momentum: twice the MB")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--slices", action="store_true", help="of the optimizer's state, by worker")
    parser.add_argument("--mirror", type=int, choices=(0, 1), help="of slices, unless the default")
    options = parser.parse_args()
    all_of_it, mirror = options.all, options.mirror
    setup = Setup(options.workers, options.layers, all_of_it, options.slices, mirror)
    found: dict[str, list[Costs]] = {way: [] for way in options.ways}
    for way, costs in list(found.items()) * options.rounds:
        costs.append(measure(way, setup))
        print(way, costs[-1], flush=True)
    print(f"{'':18}" + "".join(f"{name:>22}" for name in Costs._fields))
    for name, rows in found.items():
        medians = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:18}" + "".join(f"{value:22.3f}" for value in medians))


if __name__ == "__main__":
    if WHOLE in sys.argv:
        sys.argv.remove(WHOLE)
        coordinator_without_bases()
    else:
        main()
