"""A metric that no longer improves ends the training, where the loop beside it ends."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from stratagem.client.sdk.blocking_client import Client
from stratagem.client.sdk.views import Phase
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    ALLOWED,
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    model_parallel,
    train,
)
from tests.jobs import job
from tests.reference.evaluated_steps import stopped_loop
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import Result, federated_loop, sharded_loop

pytestmark = pytest.mark.cluster

STOP = {"patience": 2, "min_delta": 0.02}
EVALUATION = {"split": "test", "every": "2 steps", "best": "loss", "mode": "min", "stop": STOP}
ENDS = list(range(2, 41, 2))


def spec_of(strategy: dict[str, Any]) -> JobSpec:
    return job("dropout_mlp", strategy=strategy, evaluation=EVALUATION, steps=40, checkpoint=None)


@pytest.mark.parametrize("method", ["AllReduce", "ParameterServer"])
def test_replicas(client: Client, method: str) -> None:
    spec = spec_of(data_parallel(3, method))
    check(client, spec, partial(sharded_loop, spec, ALLOWED, 3))


def test_stages_of_a_pipeline(client: Client) -> None:
    spec = spec_of(model_parallel({"0 1": "worker-0", "2 3": "worker-1"}))
    check(client, spec, partial(sharded_loop, spec, ALLOWED, 1))


def test_gossiping_nodes(client: Client) -> None:
    spec = spec_of(gossip(3))
    outcome = train(client, spec)
    assert outcome.status.step < 40
    short = job("dropout_mlp", strategy=gossip(3), steps=outcome.status.step, checkpoint=None)
    assert_same_bits(outcome.state, gossip_loop(short, ALLOWED).mean)


def test_rounds_of_clients(client: Client) -> None:
    evaluation = {key: value for key, value in EVALUATION.items() if key != "every"}
    spec = federated("dropout_mlp", rounds=20, evaluation=evaluation)
    check(client, spec, lambda n: federated_loop(spec, ALLOWED, num_rounds=n), list(range(1, 21)))


def check(
    client: Client, spec: JobSpec, loop: Callable[[int], Result], ends: list[int] = ENDS
) -> None:
    outcome = train(client, spec)
    steps, state = stopped_loop(spec, ALLOWED, loop, ends)
    assert outcome.status.step == steps < ends[-1]
    assert_same_bits(outcome.state, state)
    assert outcome.status.phase is Phase.COMPLETED
    (event,) = outcome.of("StoppedEarly")
    assert outcome.status.reason == event.payload["reason"]
    assert "test.loss has not improved by more than 0.02 in 2 evaluations" in event.sentence
