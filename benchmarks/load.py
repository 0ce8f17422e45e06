"""What many workers and many runs cost the coordinator: CPU, latency, and whether it stays linear.

    python benchmarks/load.py --workers 1000 3000 10000 --hosts 4 --runs
    python benchmarks/load.py --workers 1000 --beats single    # calls, as of the version before
    python benchmarks/load.py --workers 1000 --runs 5 15 50
    python benchmarks/load.py --rendezvous 1000                # one run with so many members

The coordinator is the real one, in a process of its own; the workers are simulated in other ones
(`simulated_site.py`). This process asks for the latencies. A heartbeat does nothing but renew a
lease, so how long it takes is how late the event loop is.

What a late answer is owed to: "asked late" is how late this process itself was, which others on the
machine are to blame for. "Loop busy" is the processor's time of the longest callback, or garbage
collection, of the coordinator's event loop, with its name: this is the coordinator's own. "Loop
blocked" is the longest by the clock, with its waits for a processor.

Rows: workers without runs; then, on the most workers, runs, each on a worker of its own. The
coordinator's CPU is measured while nobody asks. In "with a page" somebody lists all workers and
scrapes the metrics every second while latencies are measured. CPU is the processor's time of the
process, as a share of one core; the load's own stands beside it, because it takes the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.simulated_hosts import INCARNATION, name_of  # noqa: E402
from benchmarks.simulated_site import Site, cpu_s, memory_mb, site  # noqa: E402
from benchmarks.watched_coordinator import Stall  # noqa: E402
from stratagem.common.rpc.channel import open_channel  # noqa: E402
from stratagem.v1 import coordinator_pb2 as pb  # noqa: E402
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub  # noqa: E402

CALLS_PER_S = 50
PATIENCE_S = 600.0
JOB: dict[str, Any] = {
    "name": "load",
    "model": {"entrypoint": "nowhere:model"},
    "data": {"entrypoint": "nowhere:data"},
    "loss": "mse",
    "optimizer": {"name": "sgd", "lr": 0.1},
    "batch_size": 10,
    "epochs": 100_000,  # each is a segment; the benchmark ends before the run does
    "strategy": {"type": "Local"},
}


@dataclass(frozen=True, slots=True)
class Load:
    """What there is to bear."""

    num_workers: int
    num_runs: int
    num_hosts: int
    beats: str
    together: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Row:
    load: Load
    register_s: float
    register_cpu_s: float
    """Of the coordinator, until all were registered."""
    cpu: float
    """Of one core."""
    load_cpu: float
    memory_mb: float
    commits_per_s: float
    heartbeat_ms: tuple[float, float]
    """p50 and p99."""
    status_ms: tuple[float, float]
    late_ms: float
    """p99 of how late this process itself was, to ask for the status."""
    stall: Stall | None
    """What has kept the coordinator's event loop busy for longest, without a page."""
    stall_ms: float
    """The longest time that anything has blocked it, waits for a processor included."""
    page_ms: tuple[float, float]
    """Of the status, while somebody lists workers and scrapes."""
    list_ms: float
    scrape_ms: float

    def cells(self) -> list[str]:
        per_commit = f"{1000 * self.cpu / self.commits_per_s:.1f}" if self.commits_per_s else ""
        stall = self.stall
        blocked = "< 5" if stall is None else f"{stall.cpu_ms:.0f} ({stall.what})"
        return [
            f"{self.load.num_workers}",
            f"{self.load.num_runs}",
            f"{self.register_s:.1f} / {self.register_cpu_s:.1f}",
            f"{100 * self.cpu:.1f}",
            f"{100 * self.load_cpu:.0f}",
            f"{1e6 * self.cpu / self.load.num_workers:.0f}",
            per_commit,
            _pair(self.heartbeat_ms),
            _pair(self.status_ms),
            f"{self.late_ms:.1f}",
            blocked,
            f"{self.stall_ms:.0f}",
            _pair(self.page_ms),
            f"{self.list_ms:.0f}",
            f"{self.scrape_ms:.0f}",
            f"{self.memory_mb:.0f}",
        ]


HEAD = [
    "workers",
    "runs",
    "register s / CPU s",
    "CPU %",
    "load's CPU %",
    "us/s per worker",
    "ms per commit",
    "heartbeat ms p50 / p99",
    "status ms p50 / p99",
    "asked late ms p99",
    "loop busy ms CPU",
    "loop blocked ms",
    "with a page",
    "list workers ms",
    "scrape ms",
    "MB",
]


def measure(load: Load) -> Row:
    """One coordinator with that many workers and runs, for some seconds after a warm-up."""
    with site(load.num_workers, load.num_hosts, load.beats, load.together) as at:
        return asyncio.run(_ask(load, at))


async def _ask(load: Load, at: Site) -> Row:
    async with open_channel(at.address) as channel:
        stub = CoordinatorServiceStub(channel)
        for n in range(load.num_runs):
            request = pb.SubmitRunRequest(run_id=f"r{n}", job_json=json.dumps(JOB))
            await stub.SubmitRun(request)
        await asyncio.sleep(12 + 0.02 * load.num_runs)  # the longest interval of heartbeats
        commits, before_s, load_s = await _commits(stub), cpu_s(at.pid), at.load_cpu_s()
        began_s = time.monotonic()
        await asyncio.sleep(load.seconds)
        took_s = time.monotonic() - began_s
        used_s, load_s = cpu_s(at.pid) - before_s, at.load_cpu_s() - load_s
        commits = await _commits(stub) - commits

        def status() -> Awaitable[object]:
            if load.num_runs:
                return stub.GetRun(pb.GetRunRequest(run_id="r0"))
            return stub.ListRuns(pb.ListRunsRequest())

        late: list[float] = []
        beats, states = await asyncio.gather(
            _latencies(lambda: stub.Heartbeat(_BEAT), load.seconds),
            _latencies(status, load.seconds, late),
        )
        stalls = at.stalls(began_s, time.monotonic())
        paging = asyncio.create_task(_page(stub, at.metrics))
        paged = await _latencies(status, load.seconds)
        paging.cancel()
        list_ms = await _latencies(lambda: _list_workers(stub), 1.0)
        scrape_ms = await _latencies(lambda: _scrape(at.metrics), 1.0)
    return Row(
        load,
        at.register_s,
        at.register_cpu_s,
        used_s / took_s,
        load_s / took_s,
        memory_mb(at.pid),
        commits / took_s,
        _p50_p99(beats),
        _p50_p99(states),
        _p50_p99(late)[1],
        max(stalls, key=lambda each: each.cpu_ms, default=None),
        max((each.wall_ms for each in stalls), default=0.0),
        _p50_p99(paged),
        _p50_p99(list_ms)[0],
        _p50_p99(scrape_ms)[0],
    )


_BEAT = pb.HeartbeatRequest(worker_id=name_of(0), incarnation=INCARNATION)


async def _page(stub: Any, metrics: str) -> None:
    while True:
        await _list_workers(stub)
        await _scrape(metrics)
        await asyncio.sleep(1)


async def _list_workers(stub: Any) -> None:
    """List all workers, page by page, as clients do."""
    request = pb.ListWorkersRequest(page_size=500)
    while True:
        answer = await stub.ListWorkers(request)
        if not answer.next_page_token:
            return
        request.page_token = answer.next_page_token


async def _scrape(metrics: str) -> object:
    def get() -> bytes:
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=PATIENCE_S) as answer:
            body: bytes = answer.read()
            return body

    return await asyncio.to_thread(get)


async def _commits(stub: Any) -> int:
    runs = (await stub.ListRuns(pb.ListRunsRequest())).runs
    return sum(run.segment for run in runs)


async def _latencies(
    call: Callable[[], Awaitable[object]], seconds: float, late: list[float] | None = None
) -> list[float]:
    """Milliseconds of calls that are made at fixed times, one after another; late: gets how late
    each one was made."""
    found: list[float] = []
    end_s = time.monotonic() + seconds
    while (began_s := time.monotonic()) < end_s or not found:
        await call()
        took_s = time.monotonic() - began_s
        found.append(1000 * took_s)
        pause_s = max(0.0, 1 / CALLS_PER_S - took_s)
        due_s = time.monotonic() + pause_s
        await asyncio.sleep(pause_s)
        if late is not None:
            late.append(1000 * (time.monotonic() - due_s))
    return found


def _pair(values: tuple[float, float]) -> str:
    return " / ".join(f"{each:.1f}" for each in values)


def _p50_p99(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, [50, 99])
    return float(low), float(high)


# ---- one run with many members ----


def rendezvous(num_members: int, num_hosts: int) -> None:
    """Have so many workers register at once, and a run form of all of them and finish a segment."""
    with site(num_members, num_hosts, "stream") as at:
        before_s = cpu_s(at.pid)
        took_s = asyncio.run(_meet(at, num_members))
        cells = [num_members, at.register_s, at.register_cpu_s, took_s, cpu_s(at.pid) - before_s]
    print("members | register s | CPU s | until the first segment s | CPU s")
    print(" | ".join(f"{cell:.1f}" if isinstance(cell, float) else f"{cell}" for cell in cells))


async def _meet(at: Site, num_members: int) -> float:
    strategy = {
        "type": "DataParallel",
        "num_replicas": num_members,
        "aggregation": {"method": "AllReduce"},
        "options": {"min_replicas": num_members},
    }
    job = JOB | {"strategy": strategy, "batch_size": num_members}
    async with open_channel(at.address) as channel:
        stub = CoordinatorServiceStub(channel)
        began_s = time.monotonic()
        await stub.SubmitRun(pb.SubmitRunRequest(run_id="r", job_json=json.dumps(job)))
        async for item in stub.WatchRun(pb.WatchRunRequest(run_id="r")):
            if item.event.kind == "SegmentFinished":
                break
            assert item.event.phase != pb.RUN_PHASE_FAILED, item.event.sentence
        return time.monotonic() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=[100, 300, 1000])
    parser.add_argument("--runs", type=int, nargs="*", default=[5, 15, 50])
    parser.add_argument("--hosts", type=int, default=2, help="processes that simulate workers")
    parser.add_argument("--beats", choices=("stream", "single"), default="stream")
    parser.add_argument(
        "--together", type=int, default=0, help="of a host register at once; 0: all"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--rendezvous", type=int, help="only this, of so many members")
    args = parser.parse_args()
    if args.rendezvous:
        rendezvous(args.rendezvous, args.hosts)
        return
    print(" | ".join(HEAD))
    loads = [(num_workers, 0) for num_workers in args.workers]
    loads += [(max(args.workers), num_runs) for num_runs in args.runs]
    for num_workers, num_runs in loads:
        told = (args.hosts, args.beats, args.together, args.seconds)
        load = Load(num_workers, num_runs, *told)
        print(" | ".join(measure(load).cells()), flush=True)


if __name__ == "__main__":
    main()
