"""A metric that is followed: one that no longer improves ends the training where the loop beside it
ends, or lowers the rates as torch's ReduceLROnPlateau does."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from stratagem.client.course.views import Phase
from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec, with_fields
from tests.cluster.jobs import (
    ALLOWED,
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    outcome_of,
    train,
)
from tests.jobs import job
from tests.reference.evaluated_steps import plateau_loop, stopped_loop
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import Result, SetRates, federated_loop, sharded_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("a metric that no longer improves ends a training or lowers its rates"),
]

STOP = {"patience": 2, "min_delta": 0.02}
EVALUATION = {"split": "test", "every": "2 steps", "best": "loss", "mode": "min", "stop": STOP}
ENDS = list(range(2, 41, 2))


def spec_of(strategy: dict[str, Any]) -> JobSpec:
    return job("dropout_mlp", strategy=strategy, evaluation=EVALUATION, steps=40, checkpoint=None)


def test_a_stop_of_replicas(client: Client) -> None:
    spec = spec_of(data_parallel(3, "ParameterServer"))
    check(client, spec, partial(sharded_loop, spec, ALLOWED, 3))


def test_a_stop_of_rounds_of_clients(client: Client) -> None:
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


PLATEAU = {"name": "plateau", "factor": 0.3, "patience": 1, "min_delta": 0.02, "cooldown": 1}
OPTIMIZER = {
    "name": "adamw",
    "lr": 0.02,
    "schedule": {**PLATEAU, "min_lr": 0.003},
    "groups": [{"name": "head", "match": ["3.*"], "lr": 0.05}],
}
FOLLOWED = {"split": "test", "every": "2 steps", "best": "loss", "mode": "min"}
PLATEAU_ENDS = list(range(2, 31, 2))


def falling(strategy: dict[str, Any]) -> JobSpec:
    sections = {"optimizer": OPTIMIZER, "evaluation": FOLLOWED, "checkpoint": None}
    return job("dropout_mlp", strategy=strategy, steps=30, **sections)


def test_rates_of_steps(client: Client) -> None:
    spec = falling(data_parallel(3))

    def loop(num_steps: int, set_rates: SetRates) -> Mapping[str, Tensor]:
        return sharded_loop(spec, ALLOWED, 3, num_steps, set_rates=set_rates).state

    rates, state = plateau_loop(spec, ALLOWED, loop, PLATEAU_ENDS)
    assert len({tuple(each) for each in rates}) > 2
    assert any(each[0] == 0.003 for each in rates)
    outcome = train(client, spec)
    assert_same_bits(outcome.state, state)
    counted = [event.payload["metrics"] for event in outcome.of("SegmentCommitted")]
    found = [int(each["plateau.lr_reductions"]) for each in counted]
    schedule = spec.optimizer.plateau
    assert schedule is not None
    assert [schedule.reduced(0.05, number) for number in found] == [each[1] for each in rates[1:]]
    # A run that resumes another one counts on.
    first = train(client, with_fields(spec, {"steps": 12}))
    second = outcome_of(client.resume_as(first.run.run_id, ["steps=30"]))
    assert second.digests[-1] == outcome.digests[-1]


def test_rates_of_gossiping_nodes(client: Client) -> None:
    spec = falling(gossip(3))

    def loop(num_steps: int, set_rates: SetRates) -> Mapping[str, Tensor]:
        return gossip_loop(spec, ALLOWED, num_steps, set_rates=set_rates).mean

    rates, state = plateau_loop(spec, ALLOWED, loop, PLATEAU_ENDS)
    assert len({tuple(each) for each in rates}) > 2
    assert_same_bits(train(client, spec).state, state)


def test_rates_of_rounds(client: Client) -> None:
    evaluation = {key: value for key, value in FOLLOWED.items() if key != "every"}
    spec = federated(
        "dropout_mlp", num_clients=2, rounds=12, optimizer=OPTIMIZER, evaluation=evaluation
    )

    def loop(num_rounds: int, set_rates: SetRates) -> Mapping[str, Tensor]:
        return federated_loop(spec, ALLOWED, num_rounds=num_rounds, set_rates=set_rates).state

    rates, state = plateau_loop(spec, ALLOWED, loop, list(range(1, 13)))
    assert len({tuple(each) for each in rates}) > 2
    assert_same_bits(train(client, spec).state, state)
