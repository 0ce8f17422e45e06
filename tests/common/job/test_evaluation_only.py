"""Jobs that train nothing: what they may say, and what a run begins from."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import InitialSpec, JobSpec

EVALUATING: dict[str, Any] = {
    "name": "evaluate",
    "model": {"entrypoint": "m:f"},
    "data": {"entrypoint": "m:d"},
    "loss": "cross_entropy",
    "evaluation": {"split": "test", "metrics": ["accuracy"], "batch_size": 32},
    "execution": {"gradient": "None"},
}
REPLICAS = {"type": "DataParallel", "num_replicas": 2, "aggregation": {"method": "AllReduce"}}
STAGES = {
    "type": "ModelParallel",
    "partitions": [{"node_ids": ["0"], "target": {"WorkerId": "a"}}],
    "communication": {"protocol": "Direct"},
}
SILOS = {
    "type": "Federated",
    "num_clients": 2,
    "rounds": 1,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
}


def refusal(**changes: Any) -> str:
    with pytest.raises(InvalidInputError) as caught:
        JobSpec.parse(EVALUATING | changes)
    return str(caught.value)


@pytest.mark.parametrize(
    "changes", [{}, {"strategy": REPLICAS}, {"batch_size": 32}, {"initial": {"digest": "a" * 64}}]
)
def test_it_has_no_optimizer_and_keeps_its_meaning_in_its_text(changes: dict[str, Any]) -> None:
    job = JobSpec.parse(EVALUATING | changes)
    assert job.only_evaluates
    assert job.batch_size == 32
    assert "optimizer" not in job.document()
    assert JobSpec.from_json(job.canonical_json()) == job


def test_stages_may_evaluate() -> None:
    assert JobSpec.parse(EVALUATING | {"strategy": STAGES}).only_evaluates


@pytest.mark.parametrize("preset", ["inference", "high_throughput"])
def test_presets_of_inference_work_as_they_are_written(preset: str) -> None:
    job = JobSpec.parse(EVALUATING | {"execution": {"preset": preset}})
    assert job.only_evaluates
    assert JobSpec.from_json(job.canonical_json()) == job


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"name": "sgd", "lr": 0.1}}, "optimizer: execution.gradient is None"),
        ({"epochs": 1}, "epochs: "),
        ({"steps": 1}, "steps: "),
        ({"accumulation": {"steps": 2}}, "no gradients to add up"),
        ({"compression": "int8"}, "no gradients to code"),
        ({"phases": {}}, "no gradients to predict"),
        ({"partition": {"method": "contiguous"}}, "no clients"),
        ({"checkpoint": {"every": "1 epoch"}}, "checkpoint.every: "),
        ({"batch_size": 16}, "batch_size: is 16, and evaluation.batch_size 32"),
        ({"evaluation": None}, "evaluation: missing"),
        ({"evaluation": {"metrics": ["accuracy"], "best": "loss"}}, "evaluation.best: "),
        ({"evaluation": {"every": "3 steps"}}, "evaluation.every: "),
        ({"strategy": SILOS}, "Federated trains, and execution.gradient is None"),
        (
            {"strategy": {**REPLICAS, "aggregation": {"method": "ParameterServer"}}},
            "nothing to aggregate",
        ),
        (
            {
                "strategy": {
                    **REPLICAS,
                    "aggregation": {"method": "Decentralized", "topology": "ring"},
                }
            },
            "nothing to aggregate",
        ),
        (
            {"execution": {"gradient": "None", "parallelism": {"PipelineParallel": 2}}},
            "cuts a model",
        ),
        (
            {"strategy": STAGES, "evaluation": {"metrics": [], "predictions": True}},
            "evaluation.predictions: is not possible under ModelParallel",
        ),
    ],
)
def test_what_belongs_to_training_is_refused(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


def test_predictions_are_those_of_a_job_that_only_evaluates() -> None:
    spec = {"evaluation": {"metrics": [], "predictions": True}}
    assert JobSpec.parse(EVALUATING | spec).evaluation.predictions  # type: ignore[union-attr]
    training = {
        "execution": {},
        "epochs": 1,
        "batch_size": 4,
        "optimizer": {"name": "sgd", "lr": 1},
    }
    assert "evaluation.predictions: belongs to a job that only" in refusal(**spec, **training)


def test_a_job_that_trains_needs_an_optimizer_and_batches() -> None:
    text = refusal(execution={}, epochs=1)
    assert "optimizer: missing" in text
    assert "batch_size: missing" in text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "exactly one of digest, run, file"),
        ({"digest": "a" * 64, "run": "r"}, "exactly one of"),
        ({"digest": "abc"}, "not a SHA-256 digest"),
        ({"file": "model.pt"}, "not a .safetensors file"),
        ({"run": "r", "which": "worst"}, "which"),
        ({"digest": "a" * 64, "which": "best"}, "only together with run"),
    ],
)
def test_what_a_run_begins_from_is_one_state(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        InitialSpec.parse(value)
    assert message in str(caught.value)
