"""The same jobs on four, three, two workers and one: the same bits, commits and metrics."""

from typing import Any

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    Gates,
    assert_same_bits,
    data_parallel,
    gossip,
    local_steps,
    outcome_of,
    park,
    train,
    wait_for,
)
from tests.cluster.references import bits_of
from tests.jobs import job, user_data
from tests.reference.loops import sharded_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("four replicas have the same bits on four, three, two workers and one"),
]


def jobs() -> dict[str, JobSpec]:
    """One of each kind of exchange; what else a job may say is the engine's matter."""
    dropout: dict[str, Any] = {"model": "dropout_mlp", "optimizer": ADAMW}
    batch_norm: dict[str, Any] = {
        "model": "batch_norm_mlp",
        "data": user_data("classes", num_rows=42),
    }
    fives = {"checkpoint": {"every": "5 steps"}}
    slices = {**data_parallel(4), "options": {"partition_state": "full"}}
    return {
        "AllReduce": job(**dropout, strategy=data_parallel(4)),
        "star": job(**batch_norm, strategy=gossip(4, "star")),
        "joined": job(**batch_norm, **fives, strategy=local_steps(4, 5, "ParameterServer")),
        "slices": job("everything", optimizer=ADAMW, strategy=slices),
    }


def test_four_replicas_on_four_three_two_one_and_four_again(
    exact_cluster: LocalCluster, client: Client, gates: Gates, lot: Gates
) -> None:
    specs = jobs()
    expected = {name: bits_of(spec) for name, spec in specs.items()}
    seen: dict[str, set[str]] = {name: set() for name in specs}
    for num_workers in (4, 3, 2, 1):
        for name, spec in specs.items():
            outcome = train(client, spec)
            members = outcome.of("MembersFormed")[-1].payload["members"]
            assert len(members) == num_workers
            assert_same_bits(outcome.state, expected[name])
            finished = [event.payload for event in outcome.of("SegmentFinished")]
            measured = [(each["loss"], each["metrics"]) for each in finished]
            seen[name].add(str((outcome.digests, measured)))
        if num_workers > 1:
            park(exact_cluster, lot, f"worker-{num_workers - 1}")
    assert {name: len(each) for name, each in seen.items()} == dict.fromkeys(specs, 1)

    # Three workers join in the middle of a run: the one that is there owns four shards, so its
    # 17th batch begins step 5, in segment 3.
    spec = job(
        "dropout_mlp",
        optimizer=ADAMW,
        data=user_data("gated", folder=str(gates.folder)),
        strategy=data_parallel(4),
    )
    gates.close("batch-17")
    run = client.submit(spec)
    wait_for(run, "SegmentCommitted", 2)
    lot.open()
    wait_for(run, "MembersFormed", where=lambda event: len(event.payload["members"]) == 4)
    gates.open()
    outcome = outcome_of(run)
    assert len(outcome.of("MembersFormed")[0].payload["members"]) == 1
    assert outcome.status.reproducible
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 4).state)
