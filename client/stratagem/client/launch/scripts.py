"""Write the programs that start the workers of one run on many machines: a batch script for Slurm,
which requeues it when it is preempted, and a Python program for Ray."""

import shlex
import signal
from pathlib import Path
from typing import Final

from stratagem.client.launch.workers import SiteProgram, WorkerLaunch, check_options
from stratagem.common.process.process_exit import PREEMPTED

# ---- Slurm ----

GRACE_S: Final = 60
"""The seconds before the Slurm job's time limit at which workers are told to commit and exit."""

SBATCH: Final = SiteProgram("sbatch", "run this on a machine with Slurm's commands")

_SLURM_SCRIPT: Final = """\
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
    """Return the batch script. options: further sbatch options, which override those set here."""
    check_options(options, "sbatch")
    directives = [
        f"--job-name={launch.run_id}",
        f"--ntasks={launch.num_workers}",
        f"--output={launch.run_id}-%j.log",
        "--no-kill",  # a lost node ends only its own workers
        "--requeue",
        "--open-mode=append",
        f"--signal=USR1@{GRACE_S}",
        *options,
    ]
    return _SLURM_SCRIPT.format(
        run_id=launch.run_id,
        coordinator=launch.coordinator,
        directives="\n".join(f"#SBATCH {directive}" for directive in directives),
        command=shlex.join(launch.command_of("slurm")),
        preempted=PREEMPTED,
    )


def submit_to_slurm(script: Path) -> str:
    """Submit a script with sbatch, and return the Slurm job id. Raises UnavailableError."""
    return SBATCH.answer("--parsable", str(script)).partition(";")[0]


# ---- Ray ----
#
# Each worker is a process beside an actor of its own. Actors take resources one by one as the
# cluster has them free. A placement group would wait until there is room for all, while a run
# begins with the workers that are there.

RAY: Final = SiteProgram("ray", "run this on a machine with Ray's commands")

_RAY_SCRIPT: Final = '''\
"""Workers of run {run_id}, whose coordinator is {coordinator}, on a cluster of Ray.

    ray job submit --no-wait --submission-id {run_id} -- {python} {run_id}.ray.py
"""

import os
import signal
import socket
import subprocess
import sys

import ray

NUM_WORKERS = {num_workers}
CPUS, GPUS = {cpus}, {gpus}  # of each
COMMAND = [
{command}
]
PREEMPTED = {preempted}  # the run goes on from its last commit, and the worker is started again
TRIES = 3  # of a worker that ends by itself with an error

# A worker commits and leaves upon SIGTERM, which it gets when its actor is gone.
END_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {sigterm})
os.execv(sys.argv[1], sys.argv[1:])
"""
# Variables of what has started Ray itself would tell all workers of a node the same place.
OTHERS = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "JOB_COMPLETION_INDEX")


@ray.remote(
    num_cpus=CPUS,
    num_gpus=GPUS,
    max_restarts=-1,
    max_task_retries=-1,
    max_concurrency=2,  # so that drain() does not wait behind work()
    scheduling_strategy="SPREAD",
)
class Place:
    """A place on some node, for one worker at a time."""

    def __init__(self, rank):
        self.rank = rank
        self.num_started = 0
        self.process = None

    def work(self):
        """Return the exit status of a worker; after the end of its run that is 0."""
        own = {{name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}}
        own |= {{"RANK": str(self.rank), "MASTER_ADDR": "{host}"}}
        self.num_started += 1
        name = f"ray-{{socket.gethostname()}}-{{os.getpid()}}-{{self.num_started}}"
        words = [sys.executable, "-c", END_WITH_PARENT, *COMMAND, "--name", name]
        self.process = subprocess.Popen(words, env=own)
        return self.process.wait()

    def drain(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)


def stop(*_):
    sys.exit(PREEMPTED)


def main():
    """Start again who was preempted or has failed, until all have left or failed too often."""
    ray.init()
    signal.signal(signal.SIGTERM, stop)
    places = [Place.remote(rank) for rank in range(NUM_WORKERS)]
    working = {{place.work.remote(): (place, TRIES) for place in places}}
    num_failed = 0
    try:
        while working:
            (done, *_), _ = ray.wait(list(working))
            place, tries = working.pop(done)
            status = ray.get(done)
            tries -= status not in (0, PREEMPTED)
            if status and tries:
                working[place.work.remote()] = place, tries
            else:
                ray.kill(place)  # others may have its resources
                num_failed += status != 0
    except SystemExit:
        for place, _ in working.values():
            place.drain.remote()
        ray.wait(list(working), num_returns=len(working))
        raise
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
'''


def ray_script(launch: WorkerLaunch, cpus: int, gpus: int, host: str) -> str:
    """Return the Ray program. cpus, gpus: those of each worker. host: the coordinator's host."""
    words = launch.command_of("env")
    for name in ("--threads", "--max-readers"):  # Ray binds no process to its cores
        if not any(word.partition("=")[0] == name for word in words):
            words += (name, str(cpus))
    return _RAY_SCRIPT.format(
        run_id=launch.run_id,
        coordinator=launch.coordinator,
        python=words[0],
        num_workers=launch.num_workers,
        cpus=cpus,
        gpus=gpus,
        command="\n".join(f"    {word!r}," for word in words),
        preempted=PREEMPTED,
        sigterm=int(signal.SIGTERM),
        host=host,
    )


def submit_to_ray(script: Path, launch: WorkerLaunch, options: tuple[str, ...]) -> None:
    """Submit a program with `ray job submit` and its options. Raises UnavailableError."""
    words = ("--no-wait", "--submission-id", launch.run_id, *options)
    RAY.answer("job", "submit", *words, "--", launch.command[0], str(script.resolve()))
