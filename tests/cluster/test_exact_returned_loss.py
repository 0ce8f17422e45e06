"""Models that return their own loss, in every kind of training: rows count as many labels as they
have, and some none."""

from typing import Any

import pytest

from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import (
    ALLOWED,
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    train,
)
from tests.jobs import job, user_model
from tests.reference.evaluation_loop import evaluation_loop
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import federated_loop, sharded_loop

pytestmark = pytest.mark.cluster

WORDS = user_model("returning:WordsForCausalLM")
SECTIONS: dict[str, Any] = {
    "data": {"entrypoint": "tests.userland.returning:words"},
    "loss": "model",
    "accumulation": {"micro_batch_size": 3},
    "evaluation": {"metrics": ["accuracy"], "batch_size": 3},
}


@pytest.mark.parametrize("method", ["AllReduce", "ParameterServer"])
def test_replicas(client: Client, method: str) -> None:
    spec = job(WORDS, strategy=data_parallel(3, method), **SECTIONS)
    outcome = train(client, spec)
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 3).state)
    measured = evaluation_loop(spec, ALLOWED, outcome.state)
    assert outcome.status.metrics.items() >= measured.items()


def test_gossiping_nodes(client: Client) -> None:
    spec = job(WORDS, strategy=gossip(3), **SECTIONS)
    assert_same_bits(train(client, spec).state, gossip_loop(spec, ALLOWED).mean)


def test_federated_clients(client: Client) -> None:
    spec = federated(WORDS, **SECTIONS)
    assert_same_bits(train(client, spec).state, federated_loop(spec, ALLOWED).state)
