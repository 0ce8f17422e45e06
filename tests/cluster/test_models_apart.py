"""Models that are trained apart and meet: more of them than there are workers, what is committed of
each, and what is measured between them."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from stratagem.client.sdk.blocking import Client
from tests.cluster.jobs import (
    ALLOWED,
    APART,
    Outcome,
    assert_same_bits,
    gossip,
    local_steps,
    train,
)
from tests.jobs import job
from tests.reference.gossip_loop import gossip_loop
from tests.reference.local_steps_loop import local_steps_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("models trained apart are committed each, and their distance is measured"),
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


def test_nodes_and_their_mean_have_the_bits_of_the_loop(client: Client, tmp_path: Path) -> None:
    num_nodes = 7
    spec = job(**APART["tied and frozen"], strategy=gossip(num_nodes, "exponential"))
    outcome = train(client, spec)
    expected = gossip_loop(spec, ALLOWED)
    assert_same_bits(outcome.state, expected.mean)
    last = outcome.of("SegmentFinished")[-1].payload
    (loss, before), (weight, more) = expected.losses[-2:], expected.weights[-2:]
    mean = (loss * weight + before * more) / (weight + more)
    assert last["loss"] == pytest.approx(mean, rel=1e-12)
    distance = last["metrics"]["train.consensus_distance"]
    assert distance == pytest.approx(expected.distance, rel=1e-12)
    assert outcome.status.reproducible
    for node, state in enumerate(nodes_in(outcome, tmp_path, num_nodes)):
        assert_same_bits(state, untied(expected.nodes[node], state))


def untied(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A file of safetensors has tied tensors once."""
    return {name: tensor for name, tensor in expected.items() if name in found}


def test_replicas_are_evaluated_where_they_are_joined(client: Client) -> None:
    evaluation = {"split": "train", "metrics": ["accuracy"]}
    spec = job(strategy=local_steps(2, 4), checkpoint=None, evaluation=evaluation)
    outcome = train(client, spec)
    steps = [event.payload["step"] for event in outcome.of("SegmentFinished")]
    assert steps == [4, 8, 10]
    assert all("train.accuracy" in e.payload["metrics"] for e in outcome.of("SegmentFinished"))
    assert_same_bits(outcome.state, local_steps_loop(spec, ALLOWED).state)
