"""Workers that each keep a slice of the state have the bits of those that keep all of it."""

from typing import Any

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    Gates,
    assert_same_bits,
    data_parallel,
    outcome_of,
    park,
    train,
    wait_for,
)
from tests.jobs import job, user_data, user_model
from tests.reference.loops import sharded_loop

pytestmark = pytest.mark.cluster

WIDE = user_model("mlp", hidden=20_011)
"""Its parameters are cut: they have 4, 1, 2 and 1 blocks of the norm."""


def partitioned(num_replicas: int, **options: Any) -> dict[str, Any]:
    given = {"partition_state": "optimizer", **options}
    return {**data_parallel(num_replicas), "options": given}


@pytest.mark.parametrize("state", ["optimizer", "full"])
def test_slices_have_the_bits_and_the_blobs_of_replicas(client: Client, state: str) -> None:
    evaluation = {"split": "test", "every": "1 epoch", "metrics": ["accuracy"], "batch_size": 3}
    data = user_data("classes", num_rows=55)
    sections = {"optimizer": ADAMW, "data": data, "evaluation": evaluation, "steps": 6}
    spec = job(WIDE, **sections, strategy=partitioned(3, partition_state=state))
    outcome = train(client, spec)
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 3).state)
    assert outcome.status.engine == "shm"
    assert outcome.status.reproducible
    replicas = train(client, job(WIDE, **sections, strategy=data_parallel(3)))
    assert outcome.digests == replicas.digests
    assert len(outcome.digests) == 3
    ends = [
        [each.payload["metrics"] for each in run.of("SegmentFinished")]
        for run in (outcome, replicas)
    ]
    assert ends[0] == ends[1]


@pytest.mark.sweep
@pytest.mark.parametrize("state", ["optimizer", "full"])
def test_four_replicas_with_slices_on_four_three_two_one_workers(
    exact_cluster: LocalCluster, client: Client, lot: Gates, state: str
) -> None:
    further = {"weight_average": {"decay": 0.9}} if state == "optimizer" else {}
    spec = job(
        "everything",
        optimizer={
            "name": "adagrad",
            "lr": 0.1,
            "initial_accumulator_value": 0.1,
            "clip_norm": 0.5,
        },
        strategy=partitioned(4, partition_state=state),
        **further,
    )
    expected = sharded_loop(spec, ALLOWED, 4)
    digests = set()
    for num_workers in (4, 3, 2, 1):
        outcome = train(client, spec)
        assert len(outcome.of("MembersFormed")[-1].payload["members"]) == num_workers
        assert_same_bits(outcome.state, expected.state)
        digests.add(tuple(outcome.digests))
        if num_workers > 1:
            park(exact_cluster, lot, f"worker-{num_workers - 1}")
    assert len(digests) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mirror": 0},
        {"partition_state": "full"},
        {"partition_state": "full", "mirror": 0},
    ],
    ids=["mirror", "alone", "full", "full alone"],
)
def test_a_worker_is_killed_in_the_middle_of_a_segment(
    exact_cluster: LocalCluster, client: Client, gates: Gates, options: dict[str, Any]
) -> None:
    """With a mirror the others go on with the step; the worker that comes back gets a slice."""
    data = user_data("gated", folder=str(gates.folder))
    sections = {"optimizer": ADAMW, "checkpoint": {"every": "5 steps"}, "data": data}
    if options.get("partition_state") != "full":
        sections["weight_average"] = {"decay": 0.9}
    spec = job(WIDE, **sections, strategy=partitioned(4, **options))
    gates.close("worker-2-batch-9")
    run = client.submit(spec)
    gates.wait_reached("worker-2-batch-9")
    wait_for(run, "SegmentCommitted", where=lambda e: e.payload["segment"] == 1)
    exact_cluster.kill("worker-2")
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    expected = sharded_loop(spec, ALLOWED, 4)
    assert_same_bits(outcome.state, expected.state)
    (lost,) = [each.sentence for each in outcome.of("MembersFormed") if " lost" in each.sentence]
    assert ("each slice of the state is left with one of them" in lost) == ("mirror" not in options)
    assert not outcome.of("SoleCopiesLost")
    undisturbed = train(client, spec)
    assert outcome.digests == undisturbed.digests
