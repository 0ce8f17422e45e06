"""Workers that a real Ray starts, moves when an actor is killed, and ends."""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec
from tests.cluster.jobs import ALLOWED, assert_same_bits, data_parallel, gates_in, outcome_of
from tests.crash.rig import until
from tests.jobs import document, user_data
from tests.launch.ray_cluster import Ray, ray_in, why_not
from tests.patience import PATIENCE_S
from tests.reference.loops import sharded_loop
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.launch,
    pytest.mark.promise("Workers that Ray starts, moves and ends train with the same bits."),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ray]:
    with ray_in(tmp_path_factory.mktemp("ray")) as ray:
        for _ in range(2):
            ray.add_node()
        yield ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with cluster.client() as client:
        yield client


def launch(ray: Ray, client: Client, run_id: str, job: dict[str, Any]) -> None:
    file = ray.folder / f"{run_id}.json"
    file.write_text(json.dumps(job))
    command = [
        *(sys.executable, "-m", "stratagem.program", "launch", "ray", str(file), "-n", "2"),
        *("--coordinator", client.address, "--run-id", run_id, "--cpus", "1"),
        *("--worker", f"--import-path {ROOT}"),
    ]
    done = subprocess.run(
        command,
        env=ray.environment,
        cwd=ray.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"Ray's job {run_id}" in done.stdout


def is_logged(cluster: LocalCluster, text: str) -> bool:
    return text in cluster.log_tail("coordinator")


def ended(ray: Ray, run_id: str, how: str) -> None:
    """Ray's job has ended so."""
    ends = ("succeeded", "failed", "was stopped")
    asked = ("job", "status", run_id)
    until(lambda: any(end in ray.ask(*asked) for end in ends), "Ray's job has ended")
    assert how in ray.ask(*asked), ray.ask("job", "logs", run_id)


def test_workers_of_ray_train_one_run_and_leave(ray: Ray, client: Client) -> None:
    spec = document(strategy=data_parallel(2))
    launch(ray, client, "whole", spec)
    outcome = outcome_of(client.get("whole"))
    ended(ray, "whole", "succeeded")
    assert not client.workers()
    expected = sharded_loop(JobSpec.model_validate(spec), ALLOWED, 2).state
    assert_same_bits(outcome.state, expected)


def test_a_lost_actor_comes_back_with_another_worker_and_the_bits_stay(
    ray: Ray, client: Client, tmp_path: Path
) -> None:
    data = user_data("gated", folder=str(tmp_path))
    spec = document(strategy=data_parallel(2), data=data, steps=10, checkpoint={"every": "2 steps"})
    with gates_in(tmp_path) as gates:
        gates.close("batch-6")
        launch(ray, client, "lost", spec)
        gates.wait_reached("batch-6")
        before = {each.worker_id for each in client.workers()}
        first = min(before)
        actor_of(first).kill()
        until(
            lambda: len({each.worker_id for each in client.workers()} - before) == 1,
            "another worker takes its place",
        )
        gates.open()
        outcome = outcome_of(client.get("lost"))
    ended(ray, "lost", "succeeded")
    assert not client.workers()
    expected = sharded_loop(JobSpec.model_validate(spec), ALLOWED, 2).state
    assert_same_bits(outcome.state, expected)


def test_a_stopped_job_of_ray_drains_its_workers_and_the_run_waits(
    ray: Ray, cluster: LocalCluster, client: Client, tmp_path: Path
) -> None:
    data = user_data("gated", folder=str(tmp_path))
    spec = document(strategy=data_parallel(2), data=data, steps=10)
    with gates_in(tmp_path) as gates:
        gates.close("batch-6")
        launch(ray, client, "stopped", spec)
        gates.wait_reached("batch-6")
        names = [each.worker_id for each in client.workers()]
        ray.ask("job", "stop", "--no-wait", "stopped")
        for name in names:
            said = f"worker {name} is draining"
            until(partial(is_logged, cluster, said), said)
        gates.open()
        until(lambda: not client.workers(), "all have left")
    assert "waiting for" in client.get("stopped").status().reason
    client.get("stopped").cancel()


def actor_of(worker: str) -> psutil.Process:
    """The process of the actor beside a worker."""
    (found,) = [
        each
        for each in psutil.process_iter(["cmdline"])
        if (words := each.info["cmdline"]) and words[1:3] == ["-m", "stratagem.worker"]
        if worker in words
    ]
    actor = found.parent()
    assert actor is not None
    return actor
