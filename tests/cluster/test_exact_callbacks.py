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
    population,
    replicated,
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


@pytest.mark.parametrize("strategy", ["AllReduce", "ParameterServer", "pipelines"])
@pytest.mark.parametrize("name", ["StopsAt", "StopsWithASegment"])
def test_a_step_that_ends_the_training(client: Client, strategy: str, name: str) -> None:
    """Within a segment of two steps, or at the end of one; the same on all members."""
    sections: dict[str, Any] = {"callbacks": f"{PLACE}:{name}", "optimizer": ADAMW}
    if strategy == "pipelines":
        spec = job(MODEL, strategy=replicated(2, CUT), **sections)
    else:
        spec = job(MODEL, strategy=data_parallel(2, strategy), **sections)
    outcome, expected = train(client, spec), sharded_loop(spec, ALLOWED, 2)
    last = len(expected.losses)
    assert last == (5 if name == "StopsAt" else 6)
    (stopped,) = outcome.of("StoppedEarly")
    assert stopped.payload["step"] == last
    assert "on_step has called view.stop()" in outcome.status.reason
    assert_same_bits(outcome.state, expected.state)
    finished = [event.payload for event in outcome.of("SegmentFinished")]
    assert [each["step"] for each in finished] == [2, 4, last]
    for each in finished:
        assert each["metrics"]["train.seen.loss"] > each["loss"] * 0.5


def test_what_a_hook_raises_ends_the_run(client: Client) -> None:
    with pytest.raises(UserCodeError, match="no such layer") as caught:
        train(client, job(strategy=data_parallel(2), callbacks=f"{PLACE}:Broken"))
    assert "tests/userland/callbacks.py" in caught.value.traceback


def test_what_is_shown_to_nobody_or_ends_only_a_part_is_refused(client: Client) -> None:
    name = f"{PLACE}:StopsAt"
    with pytest.raises(UserCodeError, match=r"strategy\.aggregation\.method Decentralized"):
        train(client, job(strategy=gossip(3), callbacks=name))
    with pytest.raises(UserCodeError, match=r"on_step cannot go with strategy\.type Federated"):
        train(client, federated(callbacks=name))
    with pytest.raises(UserCodeError, match="in a part of a run, such as a member of a population"):
        train(client, population(callbacks=name))
