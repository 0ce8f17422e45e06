"""Decentralized over real processes has the bits of the reference, whoever owns which nodes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.client.sdk.views import Progress
from stratagem.common.base.errors import InvalidInputError
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    APART,
    Gates,
    Outcome,
    assert_same_bits,
    data_parallel,
    gossip,
    outcome_of,
    park,
    train,
    wait_for,
)
from tests.jobs import job, user_data
from tests.reference.gossip_loop import GossipResult, gossip_loop
from tests.reference.loops import sharded_loop

pytestmark = pytest.mark.cluster

MATRIX = [
    ("momentum", 4, "ring"),
    ("momentum", 3, "star"),
    ("adamw clip cosine", 4, "hypercube"),
    ("dropout", 3, "random:1"),
    ("batch norm", 3, "complete"),
    ("tied and frozen", 2, "ring"),
    ("momentum", 1, "ring"),
    ("dropout", 7, "exponential"),
    ("adamw clip cosine", 6, "torus:2x3"),
]


def nodes_in(outcome: Outcome, folder: Path, num_nodes: int) -> list[dict[str, Tensor]]:
    """The model states of the nodes in the final commit."""
    tensors = load_file(outcome.run.download(folder / "final.safetensors"))
    return [
        {
            name.removeprefix(f"node{node}/model/"): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"node{node}/model/")
        }
        for node in range(num_nodes)
    ]


def assert_is(outcome: Outcome, expected: GossipResult) -> None:
    assert_same_bits(outcome.state, expected.mean)
    last = outcome.of("SegmentFinished")[-1].payload
    (loss, before), (weight, more) = expected.losses[-2:], expected.weights[-2:]
    mean = (loss * weight + before * more) / (weight + more)
    assert last["loss"] == pytest.approx(mean, rel=1e-12)
    distance = last["metrics"]["train.consensus_distance"]
    assert distance == pytest.approx(expected.distance, rel=1e-12)


@pytest.mark.parametrize(("case", "num_nodes", "topology"), MATRIX)
def test_nodes_and_their_mean_have_the_bits_of_the_loop(
    client: Client, tmp_path: Path, case: str, num_nodes: int, topology: str
) -> None:
    spec = job(**APART[case], strategy=gossip(num_nodes, topology))
    outcome = train(client, spec)
    expected = gossip_loop(spec, ALLOWED)
    assert_is(outcome, expected)
    assert len(outcome.digests) == 5
    assert outcome.status.reproducible
    for node, state in enumerate(nodes_in(outcome, tmp_path, num_nodes)):
        assert_same_bits(state, untied(expected.nodes[node], state))


def untied(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file of safetensors has tied tensors once."""
    return {name: tensor for name, tensor in expected.items() if name in found}


@pytest.mark.sweep
def test_four_nodes_on_four_three_two_one_workers(
    exact_cluster: LocalCluster, client: Client, lot: Gates
) -> None:
    specs = [
        job("dropout_mlp", optimizer=ADAMW, strategy=gossip(4, "ring")),
        job("batch_norm_mlp", data=user_data("classes", num_rows=42), strategy=gossip(4, "star")),
    ]
    expected = [gossip_loop(spec, ALLOWED) for spec in specs]
    digests: list[set[tuple[str, ...]]] = [set(), set()]
    metrics: list[set[str]] = [set(), set()]
    for num_workers in (4, 3, 2, 1):
        for index, spec in enumerate(specs):
            outcome = train(client, spec)
            members = outcome.of("MembersFormed")[-1].payload["members"]
            assert len(members) == num_workers
            assert_is(outcome, expected[index])
            digests[index].add(tuple(outcome.digests))
            finished = [event.payload for event in outcome.of("SegmentFinished")]
            metrics[index].add(str([(each["loss"], each["metrics"]) for each in finished]))
        if num_workers > 1:
            park(exact_cluster, lot, f"worker-{num_workers - 1}")
    assert [len(each) for each in digests] == [1, 1]
    assert [len(each) for each in metrics] == [1, 1]


@pytest.mark.sweep
def test_killed_worker_returns_all_nodes_to_the_last_commit(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    """Worker-1 dies inside step 6, in segment 3, after its neighbours have begun that step."""
    spec = job(
        "dropout_mlp",
        optimizer=ADAMW,
        data=user_data("gated", folder=str(gates.folder)),
        strategy=gossip(4, "ring"),
    )
    gates.close("worker-1-batch-6")
    run = client.submit(spec)
    wait_for(run, "SegmentCommitted", 2)
    exact_cluster.kill("worker-1")
    wait_for(run, "MembersFormed", where=lambda event: event.payload["membership"] > 1)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    assert_is(outcome, gossip_loop(spec, ALLOWED))
    segments = [event.payload["segment"] for event in outcome.of("SegmentCommitted")]
    assert segments == [1, 2, 3, 4, 5]
    assert outcome.status.reproducible


def test_complete_graph_without_momentum_is_plain_averaging_up_to_rounding(client: Client) -> None:
    """Mixing is linear: the mean of x_i - lr g_i is the mean minus lr times the mean gradient."""
    sections: dict[str, Any] = {
        "optimizer": {"name": "sgd", "lr": 0.1},
        "data": user_data("classes", num_rows=48),
        "execution": {"precision": "Full"},
    }
    strategy = {**gossip(4, "complete"), "options": {"consensus_every": 1}}
    run = client.submit(job(**sections, strategy=strategy))
    live = [item.metrics for item in run.watch() if isinstance(item, Progress)]
    assert any(metrics.get("train.neighbour_distance", 0.0) > 0 for metrics in live)
    distances = [metrics.get("train.consensus_distance") for metrics in live if metrics]
    assert distances
    assert all(distance is not None and distance < 1e-14 for distance in distances)
    outcome = outcome_of(run)
    expected = sharded_loop(job(**sections, strategy=data_parallel(4)), ALLOWED, 4)
    for name, tensor in outcome.state.items():
        torch.testing.assert_close(tensor, expected.state[name], rtol=0, atol=1e-14)
    distance = outcome.of("SegmentFinished")[-1].payload["metrics"]["train.consensus_distance"]
    assert distance < 1e-14


def test_topology_that_does_not_fit_is_refused_at_submit(client: Client) -> None:
    with pytest.raises(InvalidInputError, match=r"torus:2x3 has 6 nodes, not 5.*known topologies"):
        client.submit(job(strategy=gossip(5, "torus:2x3")))
