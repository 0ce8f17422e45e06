"""What only one worker has of a commit stays on it in a file: every way on from there ends with the
bits of the loop."""

import signal
from typing import Any

import psutil
import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client, RunHandle
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    Gates,
    Outcome,
    assert_same_bits,
    data_parallel,
    outcome_of,
    wait_for,
)
from tests.crash.rig import until
from tests.jobs import job, user_data
from tests.patience import PATIENCE_S
from tests.reference.local_steps_loop import local_steps_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("what one worker alone has of a commit stays in its file"),
]


def spec_of(gates: Gates, **options: Any) -> JobSpec:
    """Five segments of a join each; the second, the fourth and the last one are uploaded."""
    strategy = data_parallel(4)
    return job(
        "dropout_mlp",
        optimizer=ADAMW,
        data=user_data("gated", folder=str(gates.folder)),
        checkpoint={"every": "2 steps"},
        strategy={**strategy, "options": {"local_steps": 2, "upload_every": 2, **options}},
    )


def assert_is(outcome: Outcome, spec: JobSpec, *segments: int) -> None:
    assert_same_bits(outcome.state, local_steps_loop(spec, ALLOWED).state)
    assert [e.payload["segment"] for e in outcome.of("SegmentCommitted")] == list(segments)
    assert outcome.status.reproducible


def files_of(cluster: LocalCluster, name: str, run: RunHandle) -> Any:
    return cluster.folder / name / f"kept-{name}" / run.run_id


def test_a_killed_worker_goes_on_with_its_file(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    """In segment 4, after a commit that has no replicas."""
    spec = spec_of(gates)
    gates.close("worker-1-batch-7")
    run = client.submit(spec)
    first, whole, partial = wait_for(run, "SegmentCommitted", 3)
    gates.wait_reached("worker-1-batch-7")
    assert first.payload["size_bytes"] == partial.payload["size_bytes"]
    assert whole.payload["size_bytes"] > 2 * partial.payload["size_bytes"]
    names = [path.name for path in files_of(exact_cluster, "worker-1", run).iterdir()]
    assert "3.safetensors" in names
    exact_cluster.kill("worker-1")
    wait_for(run, "MembersFormed", where=lambda event: event.payload["membership"] > 1)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    assert_is(outcome, spec, 1, 2, 3, 4, 5)
    assert not outcome.of("SoleCopiesLost")
    kept = files_of(exact_cluster, "worker-0", run)  # until its session is closed, after the end
    until(lambda: not kept.exists(), "the worker keeps nothing of a run that has ended")


def test_a_stopped_run_is_uploaded_and_goes_on_where_it_was(client: Client, gates: Gates) -> None:
    """In segment 4, after a commit that has no replicas."""
    spec = spec_of(gates)
    gates.close("worker-1-batch-7")
    run = client.submit(spec)
    wait_for(run, "SegmentCommitted", 3)
    gates.wait_reached("worker-1-batch-7")
    run.cancel()
    gates.open()
    run.resume()
    outcome = outcome_of(run)
    (uploaded,) = outcome.of("CommitUploaded")
    assert uploaded.payload["segment"] == 3
    assert not outcome.of("SoleCopiesLost")
    assert_is(outcome, spec, 1, 2, 3, 4, 5)


def test_a_lost_file_returns_all_to_the_last_commit_that_is_whole(
    exact_cluster: LocalCluster, client: Client, gates: Gates, lot: Gates
) -> None:
    spec = spec_of(gates)
    gates.close("worker-1-batch-7")
    run = client.submit(spec)
    wait_for(run, "SegmentCommitted", 3)
    gates.wait_reached("worker-1-batch-7")
    lot.close("worker-1")
    exact_cluster.kill("worker-1")
    wait_for(run, "MembersFormed", where=lambda event: event.payload["membership"] > 1)
    path = files_of(exact_cluster, "worker-1", run) / "3.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    lot.open()
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    (lost,) = outcome.of("SoleCopiesLost")
    assert lost.payload["segment"] == 3
    assert_is(outcome, spec, 1, 2, 3, 3, 4, 5)


def test_a_worker_that_drains_leaves_its_replicas_to_the_others(
    exact_cluster: LocalCluster, client: Client, gates: Gates, lot: Gates
) -> None:
    spec = spec_of(gates)
    gates.close("worker-1-batch-7")
    run = client.submit(spec)
    wait_for(run, "SegmentCommitted", 3)
    gates.wait_reached("worker-1-batch-7")
    pid = exact_cluster.processes["worker-1"].pid
    assert pid is not None
    process = psutil.Process(pid)
    lot.close("worker-1")
    exact_cluster.kill("worker-1", signal.SIGTERM)
    wait_for(run, "UploadDue")
    gates.open()
    process.wait(timeout=PATIENCE_S)
    outcome = outcome_of(run)
    (uploaded,) = outcome.of("CommitUploaded")
    assert uploaded.payload["segment"] == 3
    assert len(outcome.of("MembersFormed")[-1].payload["members"]) == 3
    assert_is(outcome, spec, 1, 2, 3, 4, 5)
