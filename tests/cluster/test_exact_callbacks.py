"""A user's callbacks in every kind of training that has them."""

from collections.abc import Mapping
from typing import Any

import pytest

from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import UserCodeError
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    MOMENTUM,
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

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("callbacks see, log and end a training in every kind that has them"),
]

PLACE = "tests.userland.callbacks"
MODEL = user_model("dropout_mlp")
SECTIONS: dict[str, Any] = {"callbacks": f"{PLACE}:Noisy", "optimizer": ADAMW}
CUT = model_parallel([("0 1", "tag:any"), ("2 3", "tag:any")])


@pytest.mark.sweep
def test_clients_that_end_their_round(client: Client) -> None:
    """Their updates weigh as they would have; the round and the run go on."""
    options = {"local_epochs": 2}
    spec = federated(MODEL, options=options, callbacks=f"{PLACE}:EndsRounds", batch_size=4)
    outcome = train(client, spec)
    assert_same_bits(outcome.state, federated_loop(spec, ALLOWED).state)
    updates = [event.payload for event in outcome.of("UpdateReceived")]
    assert {update["num_steps"] for update in updates} == {2}
    rows = [update["num_samples"] for update in updates if update["round_num"] == 3]
    assert sum(rows) == 50
    assert all(update["metrics"]["train.seen.loss"] > 0 for update in updates)
    assert outcome.status.metrics["train.seen.loss"] > 0
    assert not outcome.of("StoppedEarly")


@pytest.mark.sweep
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


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("strategy", "name"),
    [("ParameterServer", "StopsAt"), ("pipelines", "StopsWithASegment")],
)
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


EVERY_TWO = {"split": "test", "every": "2 steps", "metrics": ["accuracy"]}


def _seen(metrics: Mapping[str, float], step: int) -> None:
    """What was logged of an evaluation, and not of another one, nor twice."""
    said = {name: metrics[f"evaluation.{name}"] for name in ("step", "twice", "so.far")}
    assert said == {"step": step, "twice": 2.0 * metrics["test.loss"], "so.far": step // 2}


@pytest.mark.parametrize(
    "strategy",
    [
        "AllReduce",
        pytest.param("Decentralized", marks=pytest.mark.sweep),
        pytest.param("pipelines", marks=pytest.mark.sweep),
    ],
)
def test_an_evaluation_that_ends_the_training(client: Client, strategy: str) -> None:
    sections: dict[str, Any] = {"optimizer": MOMENTUM, "evaluation": EVERY_TWO}
    chosen = {
        "AllReduce": data_parallel(2),
        "Decentralized": gossip(2),
        "pipelines": replicated(2, CUT),
    }[strategy]
    spec = job(MODEL, strategy=chosen, callbacks=f"{PLACE}:StopsAfterEvaluations", **sections)
    shorter = job(MODEL, strategy=chosen, epochs=None, steps=4, **sections)
    outcome = train(client, spec)
    if strategy == "Decentralized":
        assert_same_bits(outcome.state, gossip_loop(shorter, ALLOWED).mean)
    else:
        assert_same_bits(outcome.state, sharded_loop(shorter, ALLOWED, 2).state)
    assert "stopped early after 4 steps: on_evaluation has called" in outcome.status.reason
    for kind in ("SegmentFinished", "SegmentCommitted"):
        found = [event.payload for event in outcome.of(kind)]
        assert [each["step"] for each in found] == [2, 4]
        for each in found:
            _seen(each["metrics"], each["step"])
    printed = [line.text for line in outcome.run.logs() if line.text.startswith("evaluated")]
    assert printed == [f"evaluated test after {n}: ['accuracy', 'loss']" for n in (2, 4)]


@pytest.mark.sweep
def test_evaluations_of_global_models_and_members(client: Client) -> None:
    """The last one, too; the numbers are those of what was evaluated."""
    name = f"{PLACE}:WatchesEvaluations"
    spec = federated(MODEL, callbacks=name, evaluation={**EVERY_TWO, "every": "1 rounds"})
    outcome = train(client, spec)
    evaluated = {event.payload["segment"]: event.payload for event in outcome.of("Evaluated")}
    assert sorted(evaluated) == [1, 2, 3]
    for number, payload in evaluated.items():
        metrics = payload["metrics"]
        said = (metrics["evaluation.step"], metrics["evaluation.so.far"])
        assert said == (number, number)
        assert metrics["evaluation.twice"] == 2.0 * metrics["test.loss"]
    assert outcome.status.metrics["evaluation.step"] == 3
    outcome = train(client, population(callbacks=name))
    for event in outcome.of("SegmentFinished"):
        metrics = event.payload["metrics"]
        assert metrics["evaluation.twice"] == 2.0 * metrics["test.loss"]
        assert metrics["evaluation.step"] == event.payload["step"]
    assert outcome.status.metrics["evaluation.twice"] == 2.0 * outcome.status.metrics["test.loss"]
