"""Jobs that train nothing: what they may say, and what a run begins from."""

from typing import Any

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import InitialSpec, JobSpec
from tests.common.strategy.documents import DATA_PARALLEL, FEDERATED

EVALUATING: dict[str, Any] = {
    "name": "evaluate",
    "model": {"entrypoint": "m:f"},
    "data": {"entrypoint": "m:d"},
    "loss": "cross_entropy",
    "evaluation": {"split": "test", "metrics": ["accuracy"], "batch_size": 32},
    "execution": {"gradient": "None"},
}
STAGES = {
    "type": "ModelParallel",
    "partitions": [{"node_ids": ["0"], "target": {"WorkerId": "a"}}],
    "communication": {"protocol": "Direct"},
}
SERVER = DATA_PARALLEL | {"aggregation": {"method": "ParameterServer"}}
GOSSIP = DATA_PARALLEL | {"aggregation": {"method": "Decentralized", "topology": "ring"}}
PIPELINE = {"gradient": "None", "parallelism": {"PipelineParallel": 2}}
TRAINING = {"execution": {}, "epochs": 1, "batch_size": 4, "optimizer": {"name": "sgd", "lr": 1}}
PREDICTING: dict[str, Any] = {"evaluation": {"metrics": [], "predictions": True}}


def refusal(**changes: Any) -> str:
    with pytest.raises(InvalidInputError) as caught:
        JobSpec.parse(EVALUATING | changes)
    return str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {},
            {"batch_size": 32},
            {"initial": {"digest": "a" * 64}},
            {"evaluation": {"metrics": [], "predictions": True, "batch_size": 32}},
        ),
        *({"strategy": DATA_PARALLEL}, {"strategy": STAGES}),
        *({"execution": {"preset": preset}} for preset in ("inference", "high_throughput")),
    ],
)
def test_it_has_no_optimizer_and_keeps_its_meaning_in_its_text(changes: dict[str, Any]) -> None:
    job = JobSpec.parse(EVALUATING | changes)
    assert job.only_evaluates
    assert job.batch_size == 32
    assert "optimizer" not in job.document()
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
        ({"strategy": FEDERATED}, "Federated trains, and execution.gradient is None"),
        ({"strategy": SERVER}, "nothing to aggregate"),
        ({"strategy": GOSSIP}, "nothing to aggregate"),
        ({"execution": PIPELINE}, "cuts a model"),
        ({"strategy": STAGES, **PREDICTING}, "evaluation.predictions: is not possible under Model"),
        ({**PREDICTING, **TRAINING}, "evaluation.predictions: belongs to a job that only"),
        ({"execution": {}, "epochs": 1}, "optimizer: missing"),
        ({"execution": {}, "epochs": 1}, "batch_size: missing"),
    ],
)
def test_what_belongs_to_training_is_refused(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


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
