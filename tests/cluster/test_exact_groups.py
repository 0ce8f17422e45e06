"""Groups of the optimizer, one with the user's own, a schedule of the user's, and frozen
parameters, in every kind of training."""

from typing import Any

import pytest

from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import (
    ALLOWED,
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    model_parallel,
    train,
)
from tests.jobs import job, user_model
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import federated_loop, sharded_loop

pytestmark = pytest.mark.cluster

SECTIONS: dict[str, Any] = {
    "optimizer": {
        "name": "adamw",
        "lr": 0.01,
        "weight_decay": 0.2,
        "schedule": "tests.userland.schedules:one_cycle",
        "groups": [
            {"name": "biases", "match": ["0.bias"], "max_dims": 1, "weight_decay": 0.0},
            {"name": "head", "match": ["3.bias"], "lr": 0.1},
            {
                "name": "last",
                "match": ["3.*"],
                "optimizer": {
                    "entrypoint": "tests.userland.optimizers:SignMomentum",
                    "lr": 0.01,
                    "decay": 0.1,
                },
            },
        ],
    },
}
FROZEN = {**user_model("dropout_mlp"), "freeze": ["0.weight"]}


@pytest.mark.parametrize("method", ["AllReduce", "ParameterServer"])
def test_replicas(client: Client, method: str) -> None:
    spec = job(FROZEN, strategy=data_parallel(3, method), **SECTIONS)
    outcome, expected = train(client, spec), sharded_loop(spec, ALLOWED, 3)
    assert_same_bits(outcome.state, expected.state)


def test_stages_of_a_pipeline(client: Client) -> None:
    """Each of them has no parameter of some groups."""
    cut = model_parallel({"0 1": "worker-0", "2 3": "worker-1"})
    spec = job(FROZEN, strategy=cut, **SECTIONS)
    assert_same_bits(train(client, spec).state, sharded_loop(spec, ALLOWED, 1).state)


def test_gossiping_nodes(client: Client) -> None:
    spec = job(FROZEN, strategy=gossip(3), **SECTIONS)
    assert_same_bits(train(client, spec).state, gossip_loop(spec, ALLOWED).mean)


def test_federated_clients(client: Client) -> None:
    spec = federated(FROZEN, **SECTIONS)
    assert_same_bits(train(client, spec).state, federated_loop(spec, ALLOWED).state)
