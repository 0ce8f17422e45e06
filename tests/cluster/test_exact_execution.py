"""Execution settings over real processes: the bits of the reference, and what the log says."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from stratagem.client.sdk.blocking_client import Client
from stratagem.common.job import JobSpec
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.cluster.jobs import (
    ALLOWED,
    assert_same_bits,
    data_parallel,
    events_of,
    federated,
    train,
)
from tests.jobs import job, user_data, user_model
from tests.reference.loops import Result, federated_loop, sharded_loop

pytestmark = pytest.mark.cluster

IN_DTYPES = user_model("in_dtypes", dtypes=["float32", "float64", "bfloat16"])
IN_SLICES = {**data_parallel(2), "options": {"partition_state": "full"}}


@pytest.mark.parametrize(
    ("model", "num_replicas", "execution"),
    [
        ("everything", 3, {"precision": "Half", "gradient": {"Checkpointed": 2}}),
        ("dropout_mlp", 2, {"precision": "Mixed", "amp_dtype": "float16", "memory": "Cached"}),
        ("mlp", 2, {"fusion": True, "memory": "Pooled"}),
        pytest.param("dropout_mlp", 2, {"mode": "Lazy"}, marks=pytest.mark.sweep),
        pytest.param(
            "dropout_mlp",
            2,
            {"preset": "memory_efficient", "gradient": {"Checkpointed": 2}},
            marks=pytest.mark.sweep,
        ),
    ],
    ids=str,
)
def test_equals_the_sharded_loop(
    client: Client, model: str, num_replicas: int, execution: dict[str, Any]
) -> None:
    data = user_data("classes", num_rows=42)
    spec = job(model, data=data, strategy=data_parallel(num_replicas), execution=execution)
    done = train(client, spec)
    assert_same_bits(done.state, dict(sharded_loop(spec, ALLOWED, num_replicas).state))


@pytest.mark.parametrize(
    ("spec", "loop"),
    [
        (job(IN_DTYPES, strategy=IN_SLICES), partial(sharded_loop, num_shards=2)),
        (
            job(IN_DTYPES, strategy=data_parallel(2, "ParameterServer")),
            partial(sharded_loop, num_shards=2),
        ),
        (federated(IN_DTYPES, num_clients=2, rounds=2), federated_loop),
    ],
    ids=["AllReduce", "ParameterServer", "Federated"],
)
def test_a_model_keeps_its_dtypes(
    client: Client, spec: JobSpec, loop: Callable[[JobSpec, EntryPoints], Result]
) -> None:
    done = train(client, spec)
    assert {tensor.dtype for tensor in done.state.values()} == {
        torch.float32,
        torch.float64,
        torch.bfloat16,
    }
    assert_same_bits(done.state, dict(loop(spec, ALLOWED).state))


def test_a_precision_converts_the_model_and_the_run_says_so(client: Client) -> None:
    model = user_model("in_dtypes", dtypes=["float64"], casts_rows=False)
    run = client.submit(job(model, execution={"precision": "Single"}))
    assert {tensor.dtype for tensor in run.result().state_dict().values()} == {torch.float32}
    (built,) = [event.sentence for event in events_of(run) if event.kind == "ModelBuilt"]
    assert "execution.precision: Single converts 2 tensors of float64" in built


def test_what_is_done_in_another_way_stands_in_the_log(client: Client) -> None:
    execution = {"gradient": {"Checkpointed": 2}, "memory": "MinimalPeak"}
    run = client.submit(job("everything", strategy=data_parallel(2), execution=execution))
    run.result()
    texts = [line.text for line in run.logs() if line.level == "WARNING"]
    assert any("the blocks of Everything cannot be grouped" in text for text in texts)
    assert any("gradients of several workers keep their storage" in text for text in texts)
