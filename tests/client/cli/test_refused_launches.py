"""What becomes of a run whose workers an engine does not take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.cli.shared import INTERRUPTED
from stratagem.client.course.views import Phase
from stratagem.client.launch import scripts
from stratagem.client.sdk.blocking import Client, RunHandle
from tests.client.cli.command_line import invoke
from tests.client.fake_coordinator import JOB, FakeCoordinator

WRONG = [
    pytest.param([*["kubernetes", "--namespace", "My_Team"]], "--namespace: 'My_Team'", id="space"),
    pytest.param([*["kubernetes", "--queue", "Team_A"]], "--queue: 'Team_A'", id="queue"),
    pytest.param([*["kubernetes", "--service", "head"]], "--service: 'head' is not", id="service"),
    pytest.param(
        [*["kubernetes", "--worker", "--thread=4"]],
        "--worker: '--thread=4' is not an option of a worker; did you mean --threads?",
        id="kubernetes' worker",
    ),
    pytest.param(
        ["slurm", "--worker", "--threads four"],
        "--worker: --threads is 'four'; allowed is a whole number of at least 1",
        id="slurm's worker",
    ),
    pytest.param(
        ["slurm", "--worker", "--metrics-port 99999"],
        "--worker: --metrics-port is '99999'; allowed is a whole number from 0 to 65535",
        id="slurm's port",
    ),
    pytest.param(["slurm", "--worker", "--tags 'a"], '--worker: "--tags \'a"', id="quotation"),
    pytest.param(["ray", "--worker", "fast"], "--worker: 'fast' belongs to no", id="ray's worker"),
]
KUBERNETES = ("kubectl", "kubernetes", "--worker", "--allow-insecure-network")
SLURM = ("sbatch", "slurm")
RAY = ("ray", "ray")


@dataclass(frozen=True)
class Launches:
    """Launches of two workers for one job, from an own folder."""

    client: Client
    address: str
    job_file: Path
    folder: Path

    def launch(self, engine: str, *words: Any) -> Any:
        where = ["--coordinator", self.address]
        return invoke("launch", engine, self.job_file, "-n", 2, *where, *words)

    def have(self, program: str, script: str) -> None:
        """Put a program of the site into the folder."""
        (self.folder / program).write_text(f"#!/bin/bash\n{script}\n")
        (self.folder / program).chmod(0o755)


@pytest.fixture
def launches(
    client: Client, address: str, job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Launches:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return Launches(client, address, job_file, tmp_path)


@pytest.mark.parametrize("engine", [KUBERNETES, SLURM, RAY], ids=["kubernetes", "slurm", "ray"])
@pytest.mark.parametrize("was_there", [False, True])
def test_only_a_run_that_the_launch_has_started_is_stopped(
    engine: tuple[str, ...], was_there: bool, launches: Launches, fake: FakeCoordinator
) -> None:
    """Who launches workers for a second kind of nodes, and is refused, keeps those of the first."""
    fake.ending = "running"
    if was_there:
        launches.client.submit(JOB, "digits-1")
    program, name, *more = engine
    launches.have(program, "echo AlreadyExists >&2; exit 1")
    done = launches.launch(name, "--run-id", "digits-1", *more)
    assert done.exit_code != 0
    assert f"{program}: AlreadyExists" in done.output
    became = ", which was there before, goes on" if was_there else ", submitted for it, was stopped"
    assert f"; run digits-1{became}" in done.output
    phase = launches.client.get("digits-1").status().phase
    assert phase == (Phase.RUNNING if was_there else Phase.CANCELLED)


@pytest.mark.parametrize("was_there", [False, True])
def test_an_interrupt_while_the_engine_is_asked_stops_a_run_that_the_launch_has_started(
    was_there: bool, launches: Launches, fake: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.ending = "running"
    if was_there:
        launches.client.submit(JOB, "digits-1")
    launches.have("sbatch", "exit 0")
    monkeypatch.setattr(scripts, "submit_to_slurm", interrupted)
    done = launches.launch("slurm", "--run-id", "digits-1")
    assert done.exit_code == INTERRUPTED
    became = "which was there before, goes on" if was_there else "submitted for it, was stopped"
    assert done.stderr.splitlines()[-1] == f"interrupted; run digits-1, {became}"
    phase = launches.client.get("digits-1").status().phase
    assert phase == (Phase.RUNNING if was_there else Phase.CANCELLED)


@pytest.mark.parametrize(
    ("method", "what"),
    [(Client.submit, "be submitted"), (RunHandle.cancel, "not have been stopped")],
    ids=["submitting", "stopping"],
)
def test_an_interrupt_after_which_nobody_knows_says_how_to_stop_the_run(
    method: Any, what: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches.have("sbatch", "exit 0")
    monkeypatch.setattr(scripts, "submit_to_slurm", interrupted)
    owner = Client if method is Client.submit else RunHandle
    monkeypatch.setattr(owner, method.__name__, interrupted)
    done = launches.launch("slurm", "--run-id", "digits-1")
    assert done.exit_code == INTERRUPTED
    how = f"`stratagem stop digits-1 --coordinator {launches.address}` stops it"
    assert done.stderr.splitlines()[-1] == f"interrupted; run digits-1 may {what}: {how}"


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("words", "problem"), WRONG)
@pytest.mark.parametrize("how", [(), ("--print",)], ids=["submitted", "printed"])
def test_what_is_wrong_is_said_before_anything_is_submitted(
    words: list[str], problem: str, how: tuple[str, ...], launches: Launches
) -> None:
    before = sorted(launches.folder.iterdir())
    name, *more = words
    if name == "kubernetes":
        more += ["--worker", "--allow-insecure-network"]
    done = launches.launch(name, *more, *how)
    assert done.exit_code != 0
    assert f"error: {problem}" in done.output
    assert launches.client.runs() == ()
    assert sorted(launches.folder.iterdir()) == before


@pytest.mark.parametrize("name", ["slurm", "ray", "kubernetes"])
def test_an_engine_that_is_not_here_is_missed_before_the_run_is_submitted(
    name: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(launches.folder))
    done = launches.launch(name, "--worker", "--allow-insecure-network")
    assert done.exit_code != 0
    assert "error: there is no " in done.output
    assert launches.client.runs() == ()


@pytest.mark.parametrize(
    "words",
    [
        ["slurm", "--coordinator", "127.0.0.1:7070"],
        ["ray", "--coordinator", "127.0.0.1:7070"],
        ["kubernetes", "--service", "127.0.0.1:7070", "--worker", "--allow-insecure-network"],
    ],
    ids=lambda words: words[0],
)
def test_what_is_printed_is_warned_of_as_what_is_submitted(
    words: list[str], job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is written beside the job."""
    monkeypatch.chdir(job_file.parent)
    name, *more = words
    said = ["--", "--nodes=2"] if name == "slurm" else []
    done = invoke("launch", name, job_file, "-n", 2, "--print", *more, *said)
    assert done.exit_code == 0, done.output
    assert done.stderr == "only this machine can reach 127.0.0.1:7070; workers elsewhere cannot\n"
    assert "127.0.0.1:7070" in done.stdout
    assert ("#SBATCH --nodes=2" in done.stdout) == (name == "slurm")
    assert list(job_file.parent.iterdir()) == [job_file]
