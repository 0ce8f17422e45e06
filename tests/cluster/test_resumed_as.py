"""A new run that goes on from a commit of another one: two trainings in a row are one long one."""

import json
from typing import Any

import pytest

from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec, with_fields
from tests.cluster.jobs import (
    Outcome,
    data_parallel,
    federated,
    gossip,
    model_parallel,
    outcome_of,
    train,
)
from tests.jobs import job
from tests.stream_jobs import streamed

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.promise("two trainings in a row are one long one"),
]

ADAM = {
    "name": "adamw",
    "lr": 0.01,
    "schedule": {"name": "exponential", "gamma": 0.9, "warmup_steps": 3},
}
PIPELINE = model_parallel({"0 1": "worker-0", "2 3": "worker-1"})
STOP = {"patience": 9}
EVALUATION = {"split": "test", "every": "2 steps", "best": "loss", "mode": "min", "stop": STOP}


def of_steps(steps: int, strategy: dict[str, Any], **changes: Any) -> JobSpec:
    sections = {"optimizer": ADAM, "evaluation": EVALUATION, "checkpoint": None, **changes}
    return job("dropout_mlp", strategy=strategy, steps=steps, **sections)


CASES = {
    "AllReduce": of_steps(14, data_parallel(3)),
    "pipeline": of_steps(14, PIPELINE),
    "gossip": of_steps(14, gossip(3)),
    "residuals": of_steps(
        14, data_parallel(2, "ParameterServer"), compression={"codec": "ternary"}
    ),
    "Federated": federated("dropout_mlp", rounds=5, optimizer=ADAM, weight_average={"kind": "swa"}),
    "streams": of_steps(
        14, data_parallel(2), data=streamed("shards", streams=4, shuffle_rows=3, stateful=True)
    ),
}


@pytest.mark.parametrize(
    "name",
    ["AllReduce", *(pytest.param(name, marks=pytest.mark.sweep) for name in [*CASES][1:])],
)
def test_the_bits_of_one_long_training(client: Client, name: str) -> None:
    """The shorter one ends in the middle of an epoch; its step is no step of the evaluation."""
    spec = CASES[name]
    field, short, whole = ("strategy.rounds", 2, 5) if spec.steps is None else ("steps", 7, 14)
    long, first = train(client, spec), train(client, with_fields(spec, {field: short}))
    second = outcome_of(client.resume_as(first.run.run_id, [f"{field}={whole}"]))
    assert second.status.step == whole
    assert second.digests[-1] == long.digests[-1]
    assert second.status.commits[-1].average == long.status.commits[-1].average
    last, expected = (outcome.status.commits[-1].metrics for outcome in (second, long))
    assert last.get("test.loss") == expected.get("test.loss")
    assert last.get("stop.best") == expected.get("stop.best")
    begun = second.of("ModelBuilt")[0].payload
    assert (begun["step"], begun["digest"]) == (short, first.digests[-1])
    marks = first.of("SegmentCommitted")[-1].payload["streams"]
    assert begun["streams"] == marks  # so that no row is read again
    assert bool(marks) == (spec.data.streams is not None)


@pytest.fixture(scope="module")
def trained(client: Client) -> Outcome:
    return train(client, of_steps(6, data_parallel(2), retention=8, epochs=None))


@pytest.mark.sweep
def test_from_an_earlier_commit_with_other_numbers(client: Client, trained: Outcome) -> None:
    """As if they had changed in the middle of the training."""
    changes = ["steps=8", "optimizer.lr=0.001", "optimizer.weight_decay=0.5", "evaluation=null"]
    handle = client.resume_as(
        trained.run.run_id, changes, from_segment=2, new_run_id="resumed-from-2"
    )
    outcome = outcome_of(handle)
    assert outcome.run.run_id == "resumed-from-2"
    assert outcome.of("ModelBuilt")[0].payload["step"] == 4
    assert outcome.status.step == 8
    again = outcome_of(client.resume_as(trained.run.run_id, changes, from_segment=2))
    assert again.digests[-1] == outcome.digests[-1]
    plain = outcome_of(client.resume_as(trained.run.run_id, ["steps=8"], from_segment=2))
    assert plain.digests[-1] != outcome.digests[-1]


@pytest.mark.sweep
def test_what_decides_no_bits_may_be_another(client: Client) -> None:
    before, options = {"partition_state": "optimizer", "mirror": 0}, {"partition_state": "full"}
    whole = train(client, of_steps(8, data_parallel(3)))
    first = train(client, of_steps(4, {**data_parallel(3), "options": before}))
    change = f"strategy.options={json.dumps(options)}"
    second = outcome_of(client.resume_as(first.run.run_id, ["steps=8", change]))
    assert second.digests[-1] == whole.digests[-1]


@pytest.mark.sweep
def test_what_has_to_stay_is_refused(client: Client, trained: Outcome) -> None:
    for override, said in (
        ("strategy.num_replicas=4", "strategy.num_replicas: must stay as it was in the run: the s"),
        ("optimizer.name=sgd", "optimizer.name: must stay as it was in the run: the state holds"),
        ("steps=6", "steps: 6 must be more than the 6 of the state that is resumed"),
    ):
        with pytest.raises(InvalidInputError) as refused:
            client.resume_as(trained.run.run_id, [override])
        assert said in str(refused.value)


@pytest.mark.sweep
def test_epochs_that_are_over_are_refused_before_anything_is_submitted(client: Client) -> None:
    first = train(client, job("mlp", epochs=2, steps=None, strategy=data_parallel(2)))
    step = first.status.step
    before = len(client.runs())
    expected = f"epochs: 1 is a training of {step // 2} steps, and the state .* has {step} already"
    with pytest.raises(InvalidInputError, match=expected):
        client.resume_as(first.run.run_id, ["epochs=1"])
    kept = ", ".join(str(commit.segment) for commit in first.status.commits)
    with pytest.raises(InvalidInputError, match=f"segment 99 is no kept .* kept are {kept}"):
        client.resume_as(first.run.run_id, ["epochs=4"], from_segment=99)
    assert len(client.runs()) == before
