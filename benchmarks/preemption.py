"""From a preemption to the next step on Slurm: python benchmarks/preemption.py --rounds 3

A real Slurm of two nodes on this machine (as `make launch-test` starts it: root, slurm-wlm, munge),
and `stratagem launch slurm` with a worker on each. A job of a partition that preempts takes both
nodes, and ends at once. All times are from the urgent job's submission:

- `told`: both workers have had the signal and drain, since Slurm sees the urgent job;
- `freed`: the urgent job has run and ended, so both nodes were free;
- `queued`: the job waits in the queue again;
- `running`: Slurm has started it again. It would let it wait for some 120 s first, as it does with
  every job that is put back (BeginTime), since a node refuses a job again in the second in which
  it has ended there; here that wait is two seconds;
- `step`: a client that follows the run sees a step that it had not seen before;
- `of it the start`: from `running` to `step`: importing, registering, the state, a step.

The committed state is compared with that of the reference loop: `bits` says whether all are equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from stratagem.client import LocalCluster  # noqa: E402
from stratagem.client.course.views import Event  # noqa: E402
from stratagem.client.sdk.blocking import (  # noqa: E402
    Client,
    RunHandle,
)
from stratagem.common.job import JobSpec  # noqa: E402
from tests.cluster.jobs import ALLOWED, assert_same_bits, data_parallel, outcome_of  # noqa: E402
from tests.crash.jobs import paced  # noqa: E402
from tests.crash.rig import await_step, until  # noqa: E402
from tests.launch.slurm_cluster import Slurm, slurm_in, why_not  # noqa: E402
from tests.reference.loops import sharded_loop  # noqa: E402

PACE_S = 0.1
NUM_STEPS = 60
PREEMPTED_AT = 20
COLUMNS = ("told", "freed", "queued", "running", "step", "of it the start")


def paced_job() -> dict[str, Any]:
    """Sixty steps of 0.1 s on two workers, of which every tenth is committed."""
    every = {"every": "10 steps"}
    return {**paced(data_parallel(2), PACE_S, NUM_STEPS), "checkpoint": every}


class Follower(threading.Thread):
    """A client that notes when each step is seen for the first time."""

    def __init__(self, run: RunHandle) -> None:
        super().__init__(daemon=True)
        self.run_handle = run
        self.latest = 0
        self.seen_s: dict[int, float] = {}

    def run(self) -> None:
        for item in self.run_handle.watch():
            if not isinstance(item, Event) and item.step > self.latest:
                self.latest = item.step
                self.seen_s[item.step] = time.monotonic()

    def first_after(self, since_s: float) -> float:
        """When the first step after a moment was seen."""
        return min(seen_s for seen_s in self.seen_s.values() if seen_s > since_s)


def launch(slurm: Slurm, client: Client, run_id: str) -> str:
    """Submit the job with two workers, each on a node; returns the id of Slurm's job."""
    file = slurm.folder / f"{run_id}.json"
    file.write_text(json.dumps(paced_job()))
    command = [
        *(sys.executable, "-m", "stratagem.program", "launch", "slurm", str(file), "-n", "2"),
        *("--coordinator", client.address, "--run-id", run_id),
        *("--worker", f"--threads 1 --import-path {ROOT}"),
        *("--", "--nodes=2", "--exclusive"),
    ]
    done = subprocess.run(
        command,
        env=slurm.environment,
        cwd=slurm.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.partition("Slurm's job ")[2].partition(",")[0]


def preempt(slurm: Slurm, client: Client, run_id: str) -> dict[str, float]:
    """Train, preempt once, train to the end; seconds since the urgent job by name of COLUMNS."""
    number = launch(slurm, client, run_id)
    run = client.get(run_id)
    follower = Follower(run)
    follower.start()
    await_step(run, PREEMPTED_AT)
    log = slurm.folder / f"{run_id}-{number}.log"
    urgent = slurm.folder / "urgent.sh"
    urgent.write_text("#!/bin/bash\n")
    began_s, at = time.monotonic(), {}

    def note(name: str) -> None:
        at[name] = time.monotonic() - began_s

    other = slurm.ask("sbatch", "--parsable", "-p", "high", "--nodes=2", "--exclusive", str(urgent))
    until(lambda: log.read_text().count("draining") >= 2, "both have heard that they are to go")
    note("told")
    slurm.wait_state(other.strip(), "COMPLETED")
    note("freed")
    slurm.wait_state(number, "PENDING")
    note("queued")
    slurm.ask("scontrol", "update", f"JobId={number}", "StartTime=now+2")
    slurm.wait_state(number, "RUNNING")
    note("running")
    again_s = time.monotonic()
    outcome = outcome_of(run)
    at["step"] = follower.first_after(again_s) - began_s
    at["of it the start"] = at["step"] - at["running"]
    assert_same_bits(outcome.state, sharded_loop(JobSpec.parse(paced_job()), ALLOWED, 2).state)
    slurm.wait_state(number, "COMPLETED")
    return at


def main() -> None:
    """Print a row for each round and their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    print("| preempted | " + " | ".join(COLUMNS) + " | bits |")
    print("|---" * (len(COLUMNS) + 2) + "|", flush=True)
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        slurm_in(Path(folder)) as slurm,
        LocalCluster(workers=0) as cluster,
        cluster.client() as client,
    ):
        for index in range(args.rounds):
            rows.append(preempt(slurm, client, f"preempted-{index}"))
            show(f"{index + 1}", rows[-1])
    show("median", {name: statistics.median(row[name] for row in rows) for name in COLUMNS})


def show(name: str, row: dict[str, float]) -> None:
    print(
        f"| {name} | " + " | ".join(f"{row[each]:.2f}" for each in COLUMNS) + " | equal |",
        flush=True,
    )


if __name__ == "__main__":
    main()
