"""Workers that a real Slurm starts, preempts, puts back into its queue, and ends."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec
from tests.cluster.jobs import ALLOWED, assert_same_bits, data_parallel, gates_in, outcome_of
from tests.crash.rig import until
from tests.jobs import document, user_data
from tests.launch.slurm_cluster import Slurm, slurm_in, why_not
from tests.patience import PATIENCE_S
from tests.reference.loops import sharded_loop
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.launch,
    pytest.mark.promise("Workers that Slurm starts, moves and ends train with the same bits."),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_in(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=0) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with cluster.client() as client:
        yield client


def launch(slurm: Slurm, client: Client, run_id: str, job: dict[str, Any], *options: str) -> str:
    """`stratagem launch slurm` with two workers, each on a node; the id of Slurm's job."""
    file = slurm.folder / f"{run_id}.json"
    file.write_text(json.dumps(job))
    command = [
        *(sys.executable, "-m", "stratagem.program", "launch", "slurm", str(file), "-n", "2"),
        *("--coordinator", client.address, "--run-id", run_id),
        *("--worker", f"--threads 1 --import-path {ROOT}", "--", "--nodes=2", *options),
    ]
    done = subprocess.run(
        command,
        env=slurm.environment,
        cwd=slurm.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("Slurm's job ")[2].partition(",")[0]


def test_a_run_is_trained_on_two_nodes_and_the_job_ends(slurm: Slurm, client: Client) -> None:
    job = document(strategy=data_parallel(2))
    number = launch(slurm, client, "two-nodes", job)
    outcome = outcome_of(client.get("two-nodes"))
    assert_same_bits(outcome.state, sharded_loop(JobSpec.parse(job), ALLOWED, 2).state)
    told = slurm.wait_state(number, "COMPLETED", "FAILED", "CANCELLED")
    assert told["JobState"] == "COMPLETED", slurm.logs()
    until(lambda: not any(each.is_alive for each in client.workers()), "none is taken for alive")


def test_a_preempted_job_goes_back_into_the_queue_and_the_bits_stay(
    slurm: Slurm, client: Client, tmp_path: Path
) -> None:
    job = document(strategy=data_parallel(2), data=user_data("gated", folder=str(tmp_path)))
    with gates_in(tmp_path) as gates:
        gates.close("batch-6")
        number = launch(slurm, client, "preempted", job, "--exclusive")
        gates.wait_reached("batch-6")
        log = slurm.folder / f"preempted-{number}.log"
        # One alone trains, too, while the other one still starts.
        until(lambda: log.read_text().count("registered  ") >= 2, "both are here")
        urgent = slurm.folder / "urgent.sh"
        urgent.write_text("#!/bin/bash\n")
        other = slurm.ask("sbatch", "--parsable", "-p", "high", "--exclusive", str(urgent)).strip()
        until(lambda: log.read_text().count("draining") >= 2, "both have heard that they are to go")
        gates.open()
        slurm.wait_state(other, "COMPLETED")
        waiting = slurm.wait_state(number, "PENDING", "RUNNING")
        if waiting["JobState"] == "PENDING":  # for two minutes, which nobody here has to wait
            # In the second in which a job has ended on a node, the node refuses it.
            slurm.ask("scontrol", "update", f"JobId={number}", "StartTime=now+2")
        outcome = outcome_of(client.get("preempted"))
    assert_same_bits(outcome.state, sharded_loop(JobSpec.parse(job), ALLOWED, 2).state)
    told = slurm.wait_state(number, "COMPLETED", "FAILED", "CANCELLED")
    assert told["JobState"] == "COMPLETED", slurm.logs()
    assert told["Restarts"] == "1"
    formed = [event.payload["members"] for event in outcome.of("MembersFormed")]
    starts = [{member["worker_id"] for member in members} for members in formed]
    assert starts[0] <= {f"slurm-{number}-0-{rank}" for rank in range(2)}
    assert starts[-1] <= {f"slurm-{number}-1-{rank}" for rank in range(2)}


def test_a_lost_node_takes_its_own_worker_along_and_the_bits_stay(
    slurm: Slurm, client: Client, tmp_path: Path
) -> None:
    job = document(strategy=data_parallel(2), data=user_data("gated", folder=str(tmp_path)))
    with gates_in(tmp_path) as gates:
        gates.close("batch-6")
        number = launch(slurm, client, "node-lost", job)
        until(lambda: len(client.workers()) == 2, "both are there")
        gates.wait_reached("batch-6")
        slurm.lose("n2")  # the script itself is on the first one
        gates.open()
        outcome = outcome_of(client.get("node-lost"))
    assert_same_bits(outcome.state, sharded_loop(JobSpec.parse(job), ALLOWED, 2).state)
    told = slurm.wait_state(number, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    assert told["Restarts"] == "0", slurm.logs()
    formed = [event.payload["members"] for event in outcome.of("MembersFormed")]
    assert {each["worker_id"] for each in formed[-1]} == {f"slurm-{number}-0-0"}
    slurm.start_again("n2")
