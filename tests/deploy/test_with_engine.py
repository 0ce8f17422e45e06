"""`.ci/with_engine` on machines that have an engine, and on those that have none and get none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.repository import ROOT

pytestmark = pytest.mark.core

SCRIPT = ROOT / ".ci" / "with_engine"
NEEDED = ("dirname", "id", "timeout", "touch")
"""Programs of any machine that the script calls before it gives up."""


def run(path: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script on a machine that has nothing but the programs in a folder."""
    bash = shutil.which("bash")
    assert bash is not None
    return subprocess.run(
        [bash, str(SCRIPT), *command],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture(name="machine")
def _machine(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def add(machine: Path, program: str, script: str) -> None:
    path = machine / program
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_machine_without_an_engine_says_why_and_goes_on(machine: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    add(machine, "id", "echo 0")
    done = run(machine, "touch", str(ran))
    assert done.returncode == 0, done.stderr
    assert "no Docker engine answers, and there is no apt-get to install one" in done.stderr
    assert f"the command was not run: touch {ran}" in done.stderr
    assert "apt-get install docker.io docker-compose, then start dockerd" in done.stderr
    add(machine, "id", "echo 1000")
    done = run(machine, "touch", str(ran))
    assert done.returncode == 0
    assert "only root can install one" in done.stderr
    assert not ran.exists()


def test_where_an_engine_answers_the_command_decides(machine: Path, tmp_path: Path) -> None:
    add(machine, "docker", "exit 0")
    told = {"BASE_IMAGE": "some-base", "WHEELS_FROM": "", "TORCH_INDEX_URL": ""}
    seen = tmp_path / "seen"
    add(machine, "command", f'echo "$BASE_IMAGE $STRATAGEM_TEST_NEEDS_ENGINE" > {seen}; exit 7')
    assert run(machine, str(machine / "command"), **told).returncode == 7
    assert seen.read_text() == "some-base 1\n"
    # A base image that cannot be made is a failure then.
    add(machine, "docker", 'test "$1" = version')
    add(machine, "id", "echo 0")
    add(machine, "apt-get", "echo E: no network; exit 100")
    add(machine, "dpkg-query", "exit 1")
    for name in ("grep", "tail"):
        (machine / name).symlink_to(shutil.which(name) or "")
    seen.unlink()
    del told["BASE_IMAGE"]
    done = run(machine, str(machine / "command"), **told)
    assert done.returncode == 1, done.stderr
    assert "apt-get ended with status 100 (124: after 240 s): E: no network" in done.stderr
    assert "the base image or the wheels could not be made" in done.stderr
    assert not seen.exists()


def test_it_wants_a_command(machine: Path) -> None:
    assert run(machine).returncode == 2
    assert os.access(SCRIPT, os.X_OK)
