"""The same job has the same bits on any number of workers, for both engines."""

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    METHODS,
    Gates,
    assert_same_bits,
    data_parallel,
    outcome_of,
    park,
    train,
    wait_for,
)
from tests.jobs import job, user_data
from tests.reference.loops import sharded_loop

pytestmark = pytest.mark.cluster


@pytest.mark.sweep
def test_four_replicas_on_four_three_two_one_and_four_again(
    exact_cluster: LocalCluster, client: Client, gates: Gates, lot: Gates
) -> None:
    specs = {
        method: job("dropout_mlp", optimizer=ADAMW, strategy=data_parallel(4, method))
        for method in METHODS
    }
    specs["rows"] = job("dropout_mlp", data=user_data("augmented"), strategy=data_parallel(4))
    expected = {name: sharded_loop(spec, ALLOWED, 4) for name, spec in specs.items()}
    digests = set()
    for num_workers in (4, 3, 2, 1):
        for name, spec in specs.items():
            outcome = train(client, spec)
            members = outcome.of("MembersFormed")[-1].payload["members"]
            assert len(members) == num_workers
            assert_same_bits(outcome.state, expected[name].state)
            digests.add(tuple(outcome.digests))
        if num_workers > 1:
            park(exact_cluster, lot, f"worker-{num_workers - 1}")
    assert len(digests) == 2, "one of both engines, and one of rows one by one"

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
