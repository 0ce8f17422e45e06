"""What `stratagem launch slurm` hands to sbatch."""

import shlex
import subprocess
from pathlib import Path

import pytest

from stratagem.client.launch.scripts import slurm_script
from stratagem.client.launch.workers import WorkerLaunch, launch_of
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import RunId
from stratagem.common.job import JobSpec
from tests.jobs import job, user_data

RUN = RunId("digits-1")


def launched(spec: JobSpec, *options: str) -> WorkerLaunch:
    return launch_of(spec, RUN, "head:7070", 3, "/py", ("/my project",), options)


def words_of_srun(script: str) -> list[str]:
    (line,) = [line for line in script.splitlines() if line.startswith("srun")]
    return shlex.split(line)


def test_workers_may_import_what_the_job_names_and_nothing_else() -> None:
    words = words_of_srun(slurm_script(launched(job(data=user_data("classes"))), ()))
    allowed = [words[place + 1] for place, word in enumerate(words) if word == "--allow"]
    assert allowed == ["tests.userland.models:mlp", "tests.userland.data:classes"]
    assert words[:3] == ["srun", "--no-kill", "--kill-on-bad-exit=0"]
    assert words[3:6] == ["/py", "-m", "stratagem.worker"]
    assert words[-4:] == ["--import-path", "/my project", "--rendezvous", "slurm"]
    assert words[words.index("--for-run") + 1] == RUN


def test_what_is_said_takes_the_place_of_what_follows_from_the_job() -> None:
    said = ("--allow", "mine.*:*", "--import-path=/src", "--threads", "4")
    words = words_of_srun(slurm_script(launched(job(), *said), ()))
    assert words.count("--allow") == 1
    assert "/my project" not in words
    assert words[-7:-2] == list(said)


def test_options_of_sbatch_come_last_and_so_count_more() -> None:
    script = slurm_script(launched(job()), ("--time=10", "-Cfast"))
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert directives[-2:] == ["#SBATCH --time=10", "#SBATCH -Cfast"]
    assert "#SBATCH --ntasks=3" in directives
    assert "#SBATCH --requeue" in directives


@pytest.mark.parametrize("option", ["fast", "--", "-", "--time=1\n#SBATCH --uid=0"])
def test_what_is_no_option_is_refused(option: str) -> None:
    with pytest.raises(InvalidInputError, match="is not an option of sbatch"):
        slurm_script(launched(job()), (option,))


@pytest.mark.parametrize("option", ["--rendezvous", "--for-run=x", "--coordinator", "--name"])
def test_what_the_launch_says_is_left_out(option: str) -> None:
    with pytest.raises(InvalidInputError, match="is set by the launch; leave it out"):
        launched(job(), option)


@pytest.mark.parametrize(("status", "ended"), [(0, 0), (1, 1), (75, 9)])
def test_only_a_preempted_job_goes_back_into_the_queue(
    status: int, ended: int, tmp_path: Path
) -> None:
    for name, text in (("srun", f"exit {status}"), ("scontrol", 'echo "$@"; exit 9')):
        program = tmp_path / name
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "SLURM_JOB_ID": "77"}
    done = subprocess.run(
        ["bash", "-s"],
        input=slurm_script(launched(job()), ()),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ended, done.stderr
    assert done.stdout == ("requeue 77\n" if status == 75 else "")
