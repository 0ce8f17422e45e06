"""What a job says beside its strategy reaches real workers, whatever the plan that they are given:
each option under one kind of training or two, and each kind with several options."""

from typing import Any

import pytest

from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    model_parallel,
    train,
)
from tests.cluster.references import bits_of
from tests.gan_jobs import TURNS, gan
from tests.jobs import job, user_data, user_model
from tests.stream_jobs import streamed

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("what a job says beside its strategy reaches every kind of plan"),
]

PIECES: dict[str, Any] = {"protocol": "Pipeline", "micro_batch_size": 3}
WAYS: dict[str, dict[str, Any]] = {
    "AllReduce": data_parallel(3),
    "slices": {**data_parallel(2), "options": {"partition_state": "full"}},
    "ParameterServer": data_parallel(3, "ParameterServer"),
    "pipeline": model_parallel({"0 1": "worker-0", "2 3": "worker-1"}, **PIECES),
    "stages": model_parallel({"0": "worker-0", "1 2": "worker-1"}),
    "gossip": gossip(3),
}
GROUPS = [
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
]
NOISY = {
    "model": "dropout_mlp",
    "loss": None,
    "step": "tests.userland.steps:noisy",
    "predict": "tests.userland.steps:prediction",
}
AUGMENTED = {**user_data("augmented"), "collate": "tests.userland.data:jittered"}
OPTIONS: dict[str, dict[str, Any]] = {
    "groups": {
        "model": {**user_model("dropout_mlp"), "freeze": ["0.weight"]},
        "optimizer": {
            "name": "adamw",
            "lr": 0.01,
            "weight_decay": 0.2,
            "schedule": "tests.userland.schedules:one_cycle",
            "groups": GROUPS,
        },
    },
    "returned loss": {
        "model": user_model("returning:WordsForCausalLM"),
        "data": {"entrypoint": "tests.userland.returning:words"},
        "loss": "model",
        "accumulation": {"micro_batch_size": 3},
    },
    "step": NOISY,
    "step and codec": {**NOISY, "compression": "ternary"},
    "rows": {"model": "dropout_mlp", "data": AUGMENTED, "batch_size": 5},
    "rows in order": {"model": "dropout_mlp", "data": {**AUGMENTED, "order": "sequential"}},
    "streams": {
        "model": "dropout_mlp",
        "data": streamed("shards", streams=3, shuffle_rows=3),
        "batch_size": 4,
    },
    "streams of clients": {
        "model": "dropout_mlp",
        "data": streamed("shards", shuffle_rows=3),
        "batch_size": 4,
    },
    "dtypes": {"model": user_model("in_dtypes", dtypes=["float32", "float64", "bfloat16"])},
    "clipping of several blocks": {
        "model": user_model("mlp", hidden=6000),
        "optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": 0.01},
        "steps": 4,
    },
    "precision": {
        "model": "everything",
        "data": user_data("classes", num_rows=42),
        "execution": {"precision": "Half", "gradient": {"Checkpointed": 2}},
    },
    "memory": {
        "model": "dropout_mlp",
        "data": user_data("classes", num_rows=42),
        "execution": {"precision": "Mixed", "amp_dtype": "float16", "memory": "Cached"},
    },
    "turns": gan(turns=TURNS),
}
RUNS = [
    ("groups", "pipeline"),
    ("groups", "Federated"),
    ("returned loss", "gossip"),
    ("step", "Federated"),
    ("step and codec", "AllReduce"),
    ("rows", "pipeline"),
    ("rows", "Federated"),
    ("rows in order", "slices"),
    ("streams", "ParameterServer"),
    ("streams of clients", "Federated"),
    ("dtypes", "slices"),
    ("clipping of several blocks", "stages"),
    ("precision", "AllReduce"),
    ("memory", "AllReduce"),
    ("turns", "AllReduce"),
    ("turns", "Federated"),
]


def spec_of(option: str, way: str) -> JobSpec:
    sections = dict(OPTIONS[option])
    if way == "Federated":
        return federated(sections.pop("model"), **sections)
    return job(sections.pop("model"), strategy=WAYS[way], **sections)


@pytest.mark.parametrize(("option", "way"), RUNS)
def test_an_option_has_the_bits_of_its_reference(client: Client, option: str, way: str) -> None:
    spec = spec_of(option, way)
    outcome = train(client, spec)
    assert_same_bits(outcome.state, bits_of(spec))
    assert outcome.status.reproducible


def test_what_is_done_in_another_way_stands_in_the_log(client: Client) -> None:
    execution = {"gradient": {"Checkpointed": 2}, "memory": "MinimalPeak"}
    run = client.submit(job("everything", strategy=data_parallel(2), execution=execution))
    run.result()
    texts = [line.text for line in run.logs() if line.level == "WARNING"]
    assert any("the blocks of Everything cannot be grouped" in text for text in texts)
    assert any("gradients of several workers keep their storage" in text for text in texts)


def test_rows_that_differ_between_workers_are_refused_unless_the_job_allows_it(
    client: Client,
) -> None:
    said = r"data\.train: row 0 is not the same as on the worker that has built the model"
    for spec in (job(data=user_data("unseeded")), federated(data=user_data("unseeded"))):
        with pytest.raises(UserCodeError, match=said):
            train(client, spec)
    allowed = job(data=user_data("unseeded"), execution={"deterministic": False})
    assert train(client, allowed).status.phase == "COMPLETED"
