"""A user's callbacks in every kind of training that has them."""

from typing import Any

import pytest

from stratagem.client.sdk.blocking_client import Client
from stratagem.common.base.errors import UserCodeError
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    model_parallel,
    train,
)
from tests.jobs import job, user_model
from tests.reference.evaluation_loop import evaluation_loop
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import federated_loop, sharded_loop

pytestmark = pytest.mark.cluster

PLACE = "tests.userland.callbacks"
MODEL = user_model("dropout_mlp")
SECTIONS: dict[str, Any] = {"callbacks": f"{PLACE}:Noisy", "optimizer": ADAMW}
CUT = model_parallel([("0 1", "tag:any"), ("2 3", "tag:any")])


@pytest.mark.parametrize("method", ["AllReduce", "ParameterServer"])
def test_replicas(client: Client, method: str) -> None:
    spec = job(MODEL, strategy=data_parallel(3, method), **SECTIONS)
    assert_same_bits(train(client, spec).state, sharded_loop(spec, ALLOWED, 3).state)


def test_nodes_and_clients(client: Client) -> None:
    spec = job(MODEL, strategy=gossip(3), **SECTIONS)
    assert_same_bits(train(client, spec).state, gossip_loop(spec, ALLOWED).mean)
    spec = federated(MODEL, **SECTIONS)
    assert_same_bits(train(client, spec).state, federated_loop(spec, ALLOWED).state)


def test_stages(client: Client) -> None:
    """They have hooks on modules; the gradients of all parameters are nowhere."""
    measured = {"split": "test", "every": "10 steps", "metrics": ["accuracy"]}
    sections: dict[str, Any] = {"callbacks": f"{PLACE}:Shifted", "evaluation": measured}
    spec = job(MODEL, strategy=CUT, **sections)
    outcome, expected = train(client, spec), sharded_loop(spec, ALLOWED, 1)
    assert_same_bits(outcome.state, expected.state)
    means = evaluation_loop(spec, ALLOWED, expected.state)
    assert {name: outcome.status.metrics[name] for name in means} == means
    with pytest.raises(UserCodeError, match=r"strategy\.type ModelParallel"):
        train(client, job(MODEL, strategy=CUT, **SECTIONS))


def test_what_a_hook_raises_ends_the_run(client: Client) -> None:
    with pytest.raises(UserCodeError, match="no such layer") as caught:
        train(client, job(strategy=data_parallel(2), callbacks=f"{PLACE}:Broken"))
    assert "tests/userland/callbacks.py" in caught.value.traceback
