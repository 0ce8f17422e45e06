"""What becomes of a run whose workers an engine does not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.client.sdk.blocking_client import Client
from stratagem.client.sdk.views import Phase
from tests.client.cli.command_line import invoke
from tests.client.fake_coordinator import JOB, FakeCoordinator

WRONG = [
    pytest.param([*["kubernetes", "--namespace", "My_Team"]], "--namespace: 'My_Team'", id="space"),
    pytest.param([*["kubernetes", "--queue", "Team_A"]], "--queue: 'Team_A'", id="queue"),
    pytest.param([*["kubernetes", "--service", "head"]], "--service: 'head' is not", id="service"),
    pytest.param(
        [*["kubernetes", "--worker", "--thread=4"]],
        "--worker: '--thread=4' is no option of a worker; did you mean --threads?",
        id="kubernetes' worker",
    ),
    pytest.param(
        ["slurm", "--worker", "--threads four"],
        "--worker: --threads is 'four'; allowed is a whole number of at least 1",
        id="slurm's worker",
    ),
    pytest.param(["slurm", "--worker", "--tags 'a"], '--worker: "--tags \'a"', id="quotation"),
    pytest.param(["ray", "--worker", "fast"], "--worker: 'fast' belongs to no", id="ray's worker"),
]
KUBERNETES = ("kubectl", "kubernetes", "--worker", "--allow-insecure-network")
SLURM = ("sbatch", "slurm")


@pytest.mark.parametrize("engine", [KUBERNETES, SLURM], ids=["kubernetes", "slurm"])
@pytest.mark.parametrize("was_there", [False, True])
def test_only_a_run_that_the_launch_has_started_is_stopped(
    engine: tuple[str, ...],
    was_there: bool,
    fake: FakeCoordinator,
    client: Client,
    address: str,
    job_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who launches workers for a second kind of nodes, and is refused, keeps those of the first."""
    fake.ending = "running"
    if was_there:
        client.submit(JOB, "digits-1")
    program, name, *more = engine
    (tmp_path / program).write_text("#!/bin/bash\necho AlreadyExists >&2; exit 1\n")
    (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.chdir(tmp_path)
    wanted = ["launch", name, job_file, "-n", 2, "--run-id", "digits-1", "--coordinator", address]
    done = invoke(*wanted, *more)
    assert done.exit_code != 0
    assert "AlreadyExists" in done.output
    became = ", which was there before, goes on" if was_there else ", submitted for it, was stopped"
    assert f"; run digits-1{became}" in done.output
    phase = client.get("digits-1").status().phase
    assert phase == (Phase.RUNNING if was_there else Phase.CANCELLED)


@pytest.mark.parametrize(("words", "problem"), WRONG)
@pytest.mark.parametrize("how", [(), ("--print",)], ids=["submitted", "printed"])
def test_what_is_wrong_is_said_before_anything_is_submitted(
    words: list[str],
    problem: str,
    how: tuple[str, ...],
    client: Client,
    address: str,
    job_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    name, *more = words
    wanted = ["launch", name, job_file, "-n", 2, "--coordinator", address, *more, *how]
    if name == "kubernetes":
        wanted += ["--worker", "--allow-insecure-network"]
    done = invoke(*wanted)
    assert done.exit_code != 0
    assert f"error: {problem}" in done.output
    assert client.runs() == ()
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["slurm", "ray", "kubernetes"])
def test_an_engine_that_is_not_here_is_missed_before_the_run_is_submitted(
    name: str,
    client: Client,
    address: str,
    job_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    wanted = ["launch", name, job_file, "-n", 2, "--coordinator", address]
    done = invoke(*wanted, "--worker", "--allow-insecure-network")
    assert done.exit_code != 0
    assert "error: there is no " in done.output
    assert client.runs() == ()


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
    words: list[str], job_file: Path
) -> None:
    name, *more = words
    done = invoke("launch", name, job_file, "-n", 2, "--print", *more)
    assert done.exit_code == 0, done.output
    assert (
        done.stderr == "127.0.0.1:7070 is this machine alone: workers elsewhere do not reach it\n"
    )
    assert "127.0.0.1:7070" in done.stdout
