"""What becomes of a run whose workers an engine does not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.client.sdk.blocking_client import Client
from stratagem.client.sdk.views import Phase
from tests.client.cli.command_line import invoke
from tests.client.fake_coordinator import JOB, FakeCoordinator

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
    phase = client.get("digits-1").status().phase
    assert phase == (Phase.RUNNING if was_there else Phase.CANCELLED)
