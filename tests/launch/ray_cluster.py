"""A real Ray of several nodes on this machine, for the time of the tests."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.free_ports import free_port
from tests.patience import PATIENCE_S

BESIDE = Path(sys.executable).parent


def why_not() -> str:
    """Return why no Ray can be started here; empty: one can."""
    there = (BESIDE / "ray").exists()
    return "" if there else "needs Ray: make ray"


@dataclass(frozen=True, slots=True)
class Ray:
    """A head, which runs programs, and nodes with CPUs for actors."""

    folder: Path
    port: int
    environment: dict[str, str]

    def ask(self, *words: str) -> str:
        done = subprocess.run(
            ["ray", *words],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def add_node(self, *, cpus: int = 1) -> None:
        """Start a raylet of its own, as another machine would."""
        self.ask("start", f"--address=127.0.0.1:{self.port}", f"--num-cpus={cpus}", *any_ports())


def any_ports() -> tuple[str, ...]:
    """Ports of a node that Ray would otherwise take from ranges which all nodes share."""
    return (
        *("--min-worker-port=0", "--max-worker-port=0"),
        f"--dashboard-agent-listen-port={free_port()}",
    )


@contextmanager
def ray_in(folder: Path) -> Iterator[Ray]:
    """A head without CPUs, so that all actors are on nodes that may be lost."""
    # The paths of Ray's sockets, below its folder, are shorter than those of pytest's folders.
    short = Path("/tmp") / f"ray-{os.getpid()}"
    port, dashboard = free_port(), free_port()
    environment = {
        **os.environ,
        "PATH": f"{BESIDE}:{os.environ['PATH']}",
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(short),
        "NO_COLOR": "1",
    }
    ray = Ray(folder, port, environment)
    try:
        ray.ask(
            *("start", "--head", "--num-cpus=0", *any_ports()),
            f"--ray-client-server-port={free_port()}",
            *(f"--port={port}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"),
            f"--object-store-memory={100 * 2**20}",
        )
        yield ray
    finally:
        ray.ask("stop", "--force")
        shutil.rmtree(short, ignore_errors=True)
