"""Rounds of Flower as its documentation has them run: a SuperLink, two SuperNodes, `flwr run`."""

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

APP = Path(__file__).with_name("flower_app")
PATIENCE_S = 300.0
LOOK_S = 0.2


def round_ends(python: Path, mb: int, rounds: int) -> list[float]:
    """When each round ended, in seconds of the monotonic clock."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        ports = [_free_port() for _ in range(3)]
        address = f"127.0.0.1:{ports[0]}"
        (folder / "config.toml").write_text(
            f'[superlink.race]\naddress = "{address}"\ninsecure = true\n'
        )
        paths = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        own = {"FLWR_HOME": name, "FLWR_TELEMETRY_ENABLED": "0", "PATH": paths}
        log = stack.enter_context((folder / "log").open("w"))
        shared: dict[str, Any] = {"env": {**os.environ, **own}, "stdout": log, "stderr": log}

        def start(program: str, *words: str) -> None:
            command = [str(python.with_name(program)), "--insecure", *words]
            process = stack.enter_context(subprocess.Popen(command, **shared))
            stack.callback(process.terminate)

        def said(words: str) -> int:
            return (folder / "log").read_text().count(words)

        start(
            "flower-superlink", "--port", str(ports[0]), "--disable-runtime-dependency-installation"
        )
        _until(lambda: said("Uvicorn running") == 1)
        for port in ports[1:]:
            start("flower-supernode", "--superlink", address, "--port", str(port))
        _until(lambda: said("[Fleet.ActivateNode]") == 2)
        ends = folder / "ends"
        config = f"mb={mb} rounds={rounds} ends='{ends}'"
        command = [str(python.with_name("flwr")), "run", str(APP), "race", "--run-config", config]
        subprocess.run(command, check=True, **shared)
        _until(lambda: ends.exists() and len(ends.read_text().splitlines()) == rounds)
        return [float(line) for line in ends.read_text().splitlines()]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def _until(is_so: Callable[[], bool]) -> None:
    """What other programs write into files gives no event."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError("Flower's deployment did not go on")
        time.sleep(LOOK_S)
