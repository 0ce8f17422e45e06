"""Jobs with a codec over real processes have the bits of the compressed loop."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    Gates,
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    outcome_of,
    train,
    wait_for,
)
from tests.jobs import job, user_data
from tests.reference.compressed_loop import compressed_loop
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import federated_loop

pytestmark = pytest.mark.cluster

OWN = {"entrypoint": "tests.userland.optimizers:SignMomentum", "lr": 0.01, "beta": 0.8}


def test_residuals_are_part_of_the_commit(client: Client, tmp_path: Path) -> None:
    spec = job("dropout_mlp", compression="ternary", strategy=data_parallel(5), optimizer=OWN)
    outcome = train(client, spec)
    assert_same_bits(outcome.state, compressed_loop(spec, ALLOWED, 5).state)
    stored = load_file(outcome.run.download(tmp_path / "final.safetensors"))
    shards = {name.split("/")[1] for name in stored if name.startswith("residual/")}
    assert shards == {f"shard{shard}" for shard in range(5)}
    assert outcome.status.engine == "shm, ternary"


def test_killed_worker_returns_all_shards_to_the_last_commit(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    """Worker-1 dies inside step 6, in segment 3; the others have coded their shards of it."""
    spec = job(
        "dropout_mlp",
        optimizer=ADAMW,
        compression={"codec": "low_rank", "rank": 1},
        data=user_data("gated", folder=str(gates.folder)),
        strategy=data_parallel(4),
    )
    gates.close("worker-1-batch-6")
    run = client.submit(spec)
    wait_for(run, "SegmentCommitted", 2)
    exact_cluster.kill("worker-1")
    wait_for(run, "MembersFormed", where=lambda event: event.payload["membership"] > 1)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    assert_same_bits(outcome.state, compressed_loop(spec, ALLOWED, 4).state)
    assert [e.payload["segment"] for e in outcome.of("SegmentCommitted")] == [1, 2, 3, 4, 5]
    assert outcome.status.reproducible


@pytest.mark.parametrize(
    ("codec", "num_replicas"),
    [
        ("ternary", 3),  # messages go to everybody
        ("fp16", 3),  # sums come back
        ("fp16", 7),  # and go up too: messages would be more bytes
    ],
)
def test_parameter_server_has_the_bits_of_the_compressed_loop(
    client: Client, codec: str, num_replicas: int
) -> None:
    strategy = data_parallel(num_replicas, "ParameterServer")
    spec = job(
        "dropout_mlp", compression=codec, strategy=strategy, data=user_data("classes", num_rows=50)
    )
    outcome = train(client, spec)
    assert_same_bits(outcome.state, compressed_loop(spec, ALLOWED, num_replicas).state)
    assert outcome.status.engine == f"server, {codec}"
    metrics = outcome.status.metrics
    if num_replicas == 3:
        assert 0 < metrics["train.sent_bytes"] < metrics["train.uncompressed_bytes"]


@pytest.mark.parametrize(
    ("model", "codec"),
    [
        ("everything", "ternary"),
        ("batch_norm_mlp", {"codec": "int8", "stochastic": True}),
        ("mlp", {"codec": "low_rank", "rank": 2}),
        ("mlp", {"codec": "top_k", "k_fraction": 0.1}),
        ("mlp", {"codec": "vsa", "dimension_fraction": 0.5}),
    ],
)
def test_federated_has_the_bits_of_the_loop(
    client: Client, model: str, codec: str | dict[str, Any]
) -> None:
    changes: dict[str, Any] = {"batch_size": 25} if model == "batch_norm_mlp" else {}
    if codec == "ternary":
        changes = {"optimizer": OWN}
    spec = federated(model, compression=codec, num_clients=3, **changes)
    outcome = train(client, spec)
    assert_same_bits(outcome.state, federated_loop(spec, ALLOWED).state)
    for event in outcome.of("UpdateReceived"):
        traffic = event.payload["traffic"]
        assert 0 < traffic["sent_bytes"] < traffic["uncompressed_bytes"]
    sent = [event.payload["traffic"]["sent_bytes"] for event in outcome.of("UpdateReceived")]
    assert outcome.status.metrics["train.sent_bytes"] == sum(sent[-3:])  # of the last round


@pytest.mark.parametrize(("codec", "num_nodes"), [("ternary", 6), ("low_rank", 3), ("int8", 4)])
def test_gossip_has_the_bits_of_the_loop(client: Client, codec: str, num_nodes: int) -> None:
    data = user_data("classes", num_rows=50)
    own = {"optimizer": OWN} if codec == "ternary" else {}
    spec = job("dropout_mlp", compression=codec, strategy=gossip(num_nodes), data=data, **own)
    outcome = train(client, spec)
    expected = gossip_loop(spec, ALLOWED)
    assert_same_bits(outcome.state, expected.mean)
    assert outcome.status.engine == f"gloo, {codec}"
    metrics = outcome.status.metrics
    assert metrics["train.consensus_distance"] == pytest.approx(expected.distance, rel=1e-12)
    assert 0 < metrics["train.sent_bytes"] < metrics["train.uncompressed_bytes"]
