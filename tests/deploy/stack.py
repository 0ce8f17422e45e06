"""The compose cluster of this repository, under a project name of its own, and its faults."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container

ROOT = Path(__file__).parents[2]
HOW_TO_GET_AN_ENGINE = (
    "no Docker engine answers ({reason}); on Debian, as root: "
    "apt-get install docker.io docker-compose, then start dockerd"
)
UP_TIMEOUT_S = 120
BUILD_TIMEOUT_S = 900


def engine() -> docker.DockerClient:
    """The local engine; skips the test, saying how to get one, when there is none."""
    if shutil.which("docker") is None:
        pytest.skip(HOW_TO_GET_AN_ENGINE.format(reason="there is no docker program"))
    # Asked through the program: the SDK leaves a socket open when nobody answers.
    asked = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        pytest.skip(HOW_TO_GET_AN_ENGINE.format(reason=asked.stderr.strip()))
    return docker.from_env()


def compose_program() -> list[str]:
    """Compose v2 where the engine's client has it, else docker-compose."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("no docker-compose on this machine: apt-get install docker-compose")


@dataclass(slots=True)
class Stack:
    """One project of containers; `port` of this machine leads to its coordinator."""

    engine: docker.DockerClient
    port: int
    project: str = field(default_factory=lambda: f"stratagem-test-{os.getpid()}")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def up(self, num_workers: int) -> None:
        """Have exactly so many workers; those that are there go on as they are."""
        self._compose("up", "-d", "--no-build", "--no-recreate", "--scale", f"worker={num_workers}")

    def down(self) -> None:
        self._compose("down", "--volumes", "--timeout", "5")

    def log(self) -> str:
        return self._compose("logs", "--no-color", "--tail", "60")

    def containers(self, service: str) -> list[Container]:
        """Those of one service, also stopped ones."""
        labels = [
            f"com.docker.compose.project={self.project}",
            f"com.docker.compose.service={service}",
        ]
        found: list[Container] = self.engine.containers.list(all=True, filters={"label": labels})
        return found

    def coordinator(self) -> Container:
        (container,) = self.containers("coordinator")
        return container

    def worker(self, worker_id: str) -> Container:
        """The container that a worker is called after."""
        return next(each for each in self.containers("worker") if each.id.startswith(worker_id))

    def worker_ids(self) -> set[str]:
        return {each.attrs["Config"]["Hostname"] for each in self.containers("worker")}

    def kill(self, container: Container) -> None:
        """As a crash: the engine has not been asked to, so its restart policy applies."""
        container.reload()
        os.kill(container.attrs["State"]["Pid"], signal.SIGKILL)

    @contextmanager
    def disconnected(self, container: Container) -> Iterator[None]:
        """Without a network inside the block; connected again after it."""
        network = self.engine.networks.get(f"{self.project}_default")
        network.disconnect(container)
        try:
            yield
        finally:
            network.connect(container)

    @contextmanager
    def paused(self, container: Container) -> Iterator[None]:
        container.pause()
        try:
            yield
        finally:
            container.unpause()

    def _compose(self, *arguments: str) -> str:
        done = subprocess.run(
            [*compose_program(), "--project-name", self.project, *arguments],
            cwd=ROOT,
            env={**os.environ, "STRATAGEM_PORT": str(self.port)},
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def running_stack(num_workers: int) -> Iterator[Stack]:
    """Images built, containers up; all of it is gone at the end, but for the images."""
    client = engine()
    compose_program()
    build = [str(ROOT / "deploy" / "docker" / "build.sh")]
    done = subprocess.run(build, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    stack = Stack(client, _free_port())
    try:
        stack.up(num_workers)
        yield stack
    finally:
        with suppress(subprocess.TimeoutExpired):
            stack.down()
        client.close()


def _free_port() -> int:
    """A fixed one, since a port that the engine chooses changes when a container restarts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
