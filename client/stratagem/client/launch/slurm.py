"""A batch script for Slurm: workers of one run, which is put back into the queue when preempted."""

import shlex
from pathlib import Path
from typing import Final

from stratagem.client.launch.workers import WorkerLaunch, answer_of, check_options, check_program
from stratagem.common.process.process_exit import PREEMPTED

GRACE_S: Final = 60
"""Before a job's time ends Slurm sends the signal this long ahead."""

_WHERE: Final = "where Slurm's are"

SCRIPT: Final = """\
#!/bin/bash
# Workers of run {run_id}, whose coordinator is {coordinator}.
{directives}

srun --no-kill --kill-on-bad-exit=0 {command}
status=$?
# {preempted}: preempted; the run goes on from its last commit. Without this Slurm takes a job that
# ends within its grace for a failed one. Slurm starts a job again after some two minutes.
if [ "$status" = {preempted} ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def slurm_script(launch: WorkerLaunch, options: tuple[str, ...]) -> str:
    """Return the script. options: further ones of sbatch, which count more than those said here."""
    check_options(options, "sbatch")
    directives = [
        f"--job-name={launch.run_id}",
        f"--ntasks={launch.num_workers}",
        f"--output={launch.run_id}-%j.log",
        "--no-kill",  # a lost node takes its own workers along, and no others
        "--requeue",
        "--open-mode=append",
        f"--signal=USR1@{GRACE_S}",
        *options,
    ]
    return SCRIPT.format(
        run_id=launch.run_id,
        coordinator=launch.coordinator,
        directives="\n".join(f"#SBATCH {directive}" for directive in directives),
        command=shlex.join(launch.command_of("slurm")),
        preempted=PREEMPTED,
    )


def check_submit() -> None:
    """Raise UnavailableError where sbatch is missing."""
    check_program("sbatch", _WHERE)


def submit(script: Path) -> str:
    """Hand a script to sbatch, and return the id of Slurm's job. Raises UnavailableError."""
    answer = answer_of(["sbatch", "--parsable", str(script)], _WHERE)
    return answer.partition(";")[0]
