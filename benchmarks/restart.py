"""A coordinator that starts with a journal of millions of facts, and is killed while it reads it.

    python benchmarks/restart.py --facts 4000000              # of ended runs, as after an upgrade
    python benchmarks/restart.py --facts 4000000 --live 2     # of two runs that go on

The journal is a federated run that a cluster has written, with its second round repeated and the
run copied; on disk it takes 0.4 KB for each fact. The coordinator is the real one, in a process of
its own (`watched_coordinator.py`). Of ended runs the first start is killed (`kill -9`) when it has
summed up half of them; the second goes on from there; the third finds summaries alone. Of runs that
go on each start reads everything. While it reads it is asked four times a second for its health, as
a container's probe asks; `live ms` is the slowest answer, and any other answer than SERVING ends
the benchmark. "Loop busy" is the processor's time of the longest callback of its event loop, with
its name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.replay import BATCH, long_run  # noqa: E402
from benchmarks.watched_coordinator import stalls_of  # noqa: E402
from stratagem.common.base.ids import RunId  # noqa: E402
from stratagem.coordinator.store.journal import Journal  # noqa: E402
from stratagem.coordinator.store.lead import Holder  # noqa: E402
from tests.free_ports import free_port  # noqa: E402
from tests.golden.replay import FOLDER, load  # noqa: E402

FACTS_PER_ROUND = 8
FACTS_PER_RUN = 10_000
PROBE_PAUSE_S = 0.25
PROBE_TIMEOUT_S = 5.0
COLUMNS = "seq, term, kind, schema_version, payload, idem_key, time_s, wall_s"


def write(place: Path, num_facts: int, num_live: int) -> int:
    """Write a journal of ended runs, or of so many that go on; return how many runs it has."""
    num_runs = num_live or max(1, num_facts // FACTS_PER_RUN)
    num_rounds = num_facts // num_runs // FACTS_PER_ROUND
    with tempfile.TemporaryDirectory() as folder:
        golden = load(FOLDER / "0.2.0.sql", Path(folder) / "golden.sqlite")
        workers = [each.record for each in golden.read(RunId(""))][:3]
        run = [each.record for each in golden.read(RunId("golden-fedavg"))]
        golden.close()
    if num_live:
        run = [each for each in run if each.kind not in ("RunCompleted", "RunReleased")]
    journal = Journal.open(str(place))
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=10)
    records = workers + list(long_run(run, "run-0", num_rounds))
    for start in range(0, len(records), BATCH):
        journal.append(lead.term, records[start : start + BATCH])
    journal.release(lead.term)
    journal.close()
    with closing(sqlite3.connect(place)) as connection:
        for number in range(1, num_runs):
            with connection:
                connection.execute(
                    f"INSERT INTO event (run_id, {COLUMNS}) "
                    f"SELECT ?, {COLUMNS} FROM event WHERE run_id = 'run-0' ORDER BY seq",
                    [f"run-{number}"],
                )
    return num_runs


@dataclass(slots=True)
class Start:
    """One start of a coordinator, until it serves or is killed."""

    process: subprocess.Popen[bytes]
    stalls: Path
    began_s: float
    slowest_probe_s: float = 0.0
    num_probes: int = 0
    is_ready: bool = False

    def cells(self, what: str) -> str:
        cpu_s, peak_mb = _cpu_s(self.process.pid), _peak_mb(self.process.pid)
        wall_s = time.monotonic() - self.began_s
        busy = max(stalls_of(self.stalls), key=lambda each: each.cpu_ms, default=None)
        found = [f"{wall_s:.1f}", f"{cpu_s:.1f}", f"{peak_mb:.0f}", f"{self.num_probes}"]
        found.append("< 5" if busy is None else f"{busy.cpu_ms:.0f} ({busy.what})")
        return " | ".join([what, *found, f"{1000 * self.slowest_probe_s:.0f}"])


async def start(data: Path, journal: Path, until: Callable[[], bool]) -> Start:
    """Start a coordinator and ask for its health until it serves, or until that is true."""
    health = f"127.0.0.1:{free_port()}"
    watched = str(Path(__file__).with_name("watched_coordinator.py"))
    command = [sys.executable, watched, str(data / "stalls"), "--data-dir", str(data)]
    command += ["--listen", "127.0.0.1:0", "--health-port", health.rpartition(":")[2]]
    command += ["--journal", str(journal), "--metrics-port", "0", "--log-json"]
    found = Start(_started(command, data / "log"), data / "stalls", time.monotonic())
    async with grpc.aio.insecure_channel(health) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await _probe(stub, "live", wait_for_ready=True)  # it listens
        while not found.is_ready and not until():
            assert found.process.poll() is None, (data / "log").read_text()[-2000:]
            began_s = time.monotonic()
            assert await _probe(stub, "live"), "is not live while it reads its journal"
            found.slowest_probe_s = max(found.slowest_probe_s, time.monotonic() - began_s)
            found.num_probes += 1
            found.is_ready = await _probe(stub, "")
            await asyncio.sleep(PROBE_PAUSE_S)
    return found


def _started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(command, stderr=file, stdout=file)


async def _probe(stub: Any, service: str, **kinds: bool) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    answer = await stub.Check(request, timeout=None if kinds else PROBE_TIMEOUT_S, **kinds)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    process.send_signal(number)
    process.wait()


def _num_summaries(journal: Path) -> int:
    with closing(sqlite3.connect(journal)) as connection:
        (num,) = connection.execute("SELECT COUNT(*) FROM summary").fetchone()
    return int(num)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


async def _measure(data: Path, journal: Path, num_runs: int, num_live: int) -> None:
    print("start | s | CPU s | peak MB | probes | loop busy ms CPU | live ms", flush=True)
    if not num_live:
        half = await start(data, journal, lambda: _num_summaries(journal) >= num_runs // 2)
        assert not half.is_ready, "it was ready before it could be killed"
        print(half.cells("killed half-way"), flush=True)
        _end(half.process, signal.SIGKILL)
    for what in ("goes on from there", "again") if not num_live else ("first", "again"):
        whole = await start(data, journal, lambda: False)
        print(whole.cells(what), flush=True)
        _end(whole.process, signal.SIGKILL if num_live else signal.SIGTERM)
    for line in (data / "log").read_text().splitlines():
        if "journal replayed" in line:
            told = json.loads(line)
            print({key: told[key] for key in ("facts", "runs", "summaries")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--facts", type=int, default=100_000)
    parser.add_argument("--live", type=int, default=0, help="of so many runs that go on")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        journal, began_s = data / "journal.sqlite", time.monotonic()
        num_runs = write(journal, chosen.facts, chosen.live)
        size_gb = journal.stat().st_size / 1e9
        took_s = time.monotonic() - began_s
        print(f"{num_runs} runs, {size_gb:.2f} GB, written in {took_s:.0f} s", flush=True)
        asyncio.run(_measure(data, journal, num_runs, chosen.live))


if __name__ == "__main__":
    main()
