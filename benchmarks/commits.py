"""What commits of a large state cost: whole ones against what has changed since the one before.

    python benchmarks/commits.py --rounds 3

One worker trains the last layer of a model whose other layers are frozen, and commits after every
step. "Whole" is the same coordinator without a memory of what it was sent before. The two ways take
turns, each with a cluster of its own. Printed per commit are medians, over the rounds, of the bytes
that the coordinator receives, of CPU seconds of coordinator and worker (with the step: the same in
both), of seconds between commits, and of the peak of the coordinator's memory.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.federated_round import resident_bytes
from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.views import Event
from tests.common.observe.scrape import labelled
from tests.common.observe.scrape import scrape_process as scraped
from tests.jobs import document

ROOT = Path(__file__).parents[1]
WHOLE = "--without-bases"
WIDTH = 4096
NUM_FEATURES, NUM_CLASSES = 12, 5
NUM_COMMITS = 6
NUM_WARMUP_COMMITS = 1
STATES = labelled(direction="received", kind="state")


def tuned(num_layers: int) -> nn.Module:
    """67 MB for each frozen layer, and a head that trains."""
    frozen = [nn.Linear(NUM_FEATURES, WIDTH), nn.Tanh()]
    for _ in range(num_layers):
        frozen += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(
        nn.Sequential(*frozen).requires_grad_(False), nn.Linear(WIDTH, NUM_CLASSES)
    )


class Costs(NamedTuple):
    """Of one commit; memory of all."""

    received_mb: float
    coordinator_cpu_s: float
    worker_cpu_s: float
    seconds: float
    coordinator_peak_mb: float


def measure(num_layers: int, *, whole: bool) -> Costs:
    program = [sys.executable, __file__, WHOLE] if whole else None
    programs = {"worker": [sys.executable, "-m", "stratagem.worker"]}
    programs["coordinator"] = program or [sys.executable, "-m", "stratagem.coordinator"]
    job = document(
        {"entrypoint": "benchmarks.commits:tuned", "kwargs": {"num_layers": num_layers}},
        steps=NUM_COMMITS,
        checkpoint={"every": "1 steps"},
        retention=2,
        strategy={"type": "Local"},
    )
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(
            workers=1,
            threads=1,
            data_dir=Path(folder),
            allow=["benchmarks.*:*", "tests.userland.*:*"],
            import_path=(ROOT,),
            programs=programs,
            environment={"STRATAGEM_COORDINATOR_METRICS_PORT": "0"},
        )
        with cluster, cluster.client() as client:
            pids = {name: cast(int, each.pid) for name, each in cluster.processes.items()}
            run = client.submit(job)
            seen: list[tuple[float, ...]] = []
            for item in run.watch():
                if isinstance(item, Event) and item.kind == "SegmentCommitted":
                    bytes_ = scraped(cluster, "coordinator")["stratagem_stream_bytes_total"][STATES]
                    cpu = (_cpu_s(pids[name]) for name in ("coordinator", "worker-0"))
                    seen.append((bytes_ / 1e6, *cpu, item.time_s))
            run.result()
            peak = resident_bytes(pids["coordinator"], "VmHWM") / 1e6
    first, last = seen[NUM_WARMUP_COMMITS - 1], seen[-1]
    num = len(seen) - NUM_WARMUP_COMMITS
    received, coordinator, worker, seconds = (
        (b - a) / num for a, b in zip(first, last, strict=True)
    )
    return Costs(received, coordinator, worker, seconds, peak)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def coordinator_without_bases() -> None:
    """A coordinator that asks for all of each snapshot."""
    from stratagem.coordinator.effects.synchronous import snapshot
    from stratagem.coordinator.process.main import main as run_coordinator

    async def none(_env: Any, _at: Any) -> None:
        return None

    snapshot._base = none  # type: ignore[assignment]
    run_coordinator()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8, help="frozen ones, of 67 MB each")
    options = parser.parse_args()
    found: dict[str, list[Costs]] = {"whole": [], "what has changed": []}
    for name, costs in list(found.items()) * options.rounds:
        costs.append(measure(options.layers, whole=name == "whole"))
        print(name, costs[-1], flush=True)
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
