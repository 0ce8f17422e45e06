"""A coordinator with simulated workers, as benchmarks have them: each part a process of its own.

The coordinator is the real one, and writes down what blocks its event loop
(`watched_coordinator.py`). The workers are in processes of their own (`simulated_hosts.py`).
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.watched_coordinator import Stall, stalls_of
from tests.free_ports import free_port


@dataclass(frozen=True, slots=True)
class Site:
    """A coordinator with registered workers."""

    address: str
    metrics: str
    pid: int
    hosts: tuple[int, ...]
    register_s: float
    register_cpu_s: float
    stalls_file: Path

    def load_cpu_s(self) -> float:
        return sum(map(cpu_s, self.hosts))

    def stalls(self, began_s: float, end_s: float) -> list[Stall]:
        """What has blocked the coordinator's event loop between two monotonic times."""
        return [each for each in stalls_of(self.stalls_file) if began_s <= each.end_s <= end_s]


@contextmanager
def site(num_workers: int, num_hosts: int, beats: str, together: int = 0) -> Iterator[Site]:
    """Start a coordinator, and workers, of which so many of a host register at once; 0: all."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address, ready = f"127.0.0.1:{free_port()}", folder / "ready"
        flags = ["--listen", address, "--data-dir", str(folder / "data"), "--metrics-port", "0"]
        flags += ["--max-workers", str(max(10_000, num_workers)), "--ready-file", str(ready)]
        command = [sys.executable, str(Path(__file__).with_name("watched_coordinator.py"))]
        coordinator = subprocess.Popen(
            [*command, str(folder / "stalls"), *flags], stderr=subprocess.PIPE
        )
        stack.callback(_end, coordinator)
        _wait_until_it_serves(coordinator)
        before_s = cpu_s(coordinator.pid)
        hosts = []
        for k in range(num_hosts):
            first, end = (num_workers * i // num_hosts for i in (k, k + 1))
            command = [sys.executable, str(Path(__file__).with_name("simulated_hosts.py")), address]
            command += ["--first", str(first), "--workers", str(end - first), "--beats", beats]
            command += ["--together", str(together)]
            host = subprocess.Popen(command, stdout=subprocess.PIPE)
            stack.callback(_end, host)
            hosts.append(host)
        took_s = max(_said(host) for host in hosts)
        yield Site(
            address,
            json.loads(ready.read_text())["metrics_address"],
            coordinator.pid,
            tuple(host.pid for host in hosts),
            took_s,
            cpu_s(coordinator.pid) - before_s,
            folder / "stalls",
        )


def cpu_s(pid: int) -> float:
    """The processor's seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """The anonymous memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def _said(host: subprocess.Popen[bytes]) -> float:
    assert host.stdout is not None
    return float(json.loads(host.stdout.readline()))


def _wait_until_it_serves(coordinator: subprocess.Popen[bytes]) -> None:
    """Read the log of a coordinator until it says so; what follows is read for nobody."""
    log, said = coordinator.stderr, b""
    assert log is not None
    while b"coordinator serves" not in said:
        line = log.readline()
        assert line, said.decode()
        said += line
    threading.Thread(target=lambda: collections.deque(log, maxlen=0), daemon=True).start()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
