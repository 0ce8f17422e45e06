"""The compose cluster of this repository, under a project name of its own, and its faults."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import docker
import pytest
from docker.models.containers import Container

from tests.free_ports import free_port
from tests.repository import ROOT

HOW_TO_GET_AN_ENGINE = (
    "no Docker engine answers ({reason}); on Debian, as root: "
    "apt-get install docker.io docker-compose, then start dockerd"
)
NEEDS_ENGINE = "STRATAGEM_TEST_NEEDS_ENGINE"
"""Set where an engine has answered: to have none is a failure then, and no reason to skip."""
UP_TIMEOUT_S = 120
BUILD_TIMEOUT_S = 900


def without(reason: str) -> NoReturn:
    """Ends the test, saying what this machine lacks."""
    if os.environ.get(NEEDS_ENGINE):
        pytest.fail(reason)
    pytest.skip(reason)


def engine() -> docker.DockerClient:
    """The local engine; ends the test, saying how to get one, when there is none."""
    if shutil.which("docker") is None:
        without(HOW_TO_GET_AN_ENGINE.format(reason="there is no docker program"))
    # Asked through the program: the SDK leaves a socket open when nobody answers.
    asked = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        without(HOW_TO_GET_AN_ENGINE.format(reason=asked.stderr.strip()))
    return docker.from_env()


def compose_program() -> list[str]:
    """Compose v2 where the engine's client has it, else docker-compose."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    without("no docker-compose on this machine: apt-get install docker-compose")


@dataclass(slots=True)
class Stack:
    """One project of containers; `port` of this machine leads to its coordinator."""

    engine: docker.DockerClient
    port: int
    certs: Path | None = None
    """Where certificates lie; with them deploy/compose.tls.yml counts too."""
    project: str = field(init=False)

    def __post_init__(self) -> None:
        kind = "" if self.certs is None else "-tls"
        self.project = f"stratagem-test-{os.getpid()}{kind}"

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

    def serves(self) -> bool:
        """Whether the coordinator leads, as its health command says."""
        state = self.coordinator().attrs["State"]
        return bool(state.get("Health", {}).get("Status") == "healthy")

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
        files = ["--file", "docker-compose.yml"]
        environment = {**os.environ, "STRATAGEM_PORT": str(self.port)}
        if self.certs is not None:
            files += ["--file", "deploy/compose.tls.yml"]
            environment["STRATAGEM_CERTS"] = str(self.certs)
        done = subprocess.run(
            [*compose_program(), *files, "--project-name", self.project, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=UP_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def running_stack(num_workers: int, certs: Path | None = None) -> Iterator[Stack]:
    """Images built, containers up; all of it is gone at the end, but for the images."""
    client = engine()
    compose_program()
    build = [str(ROOT / "deploy" / "docker" / "build.sh")]
    done = subprocess.run(build, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    # A fixed port, since one that the engine chooses changes when a container restarts.
    stack = Stack(client, free_port(), certs)
    try:
        stack.up(num_workers)
        yield stack
    finally:
        with suppress(subprocess.TimeoutExpired):
            stack.down()
        client.close()
