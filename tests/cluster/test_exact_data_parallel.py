"""DataParallel and Local over real processes have the bits of the reference loops."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.client.sdk.blocking_client import Client
from stratagem.client.sdk.views import Phase
from stratagem.common.base.errors import RunFailedError
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    METHODS,
    MOMENTUM,
    assert_same_bits,
    data_parallel,
    train,
)
from tests.jobs import job, user_data
from tests.reference.loops import plain_loop, sharded_loop
from tests.reference.phases_loop import phases_loop

pytestmark = pytest.mark.cluster

GRAPH = {
    "graph": {
        "nodes": [
            {"id": "wide", "module": "Linear", "kwargs": {"in_features": 12, "out_features": 8}},
            {"id": "deep", "module": "Linear", "kwargs": {"in_features": 12, "out_features": 8}},
            {"id": "bend", "module": "Tanh"},
            {"id": "sum", "module": "Add"},
            {"id": "drop", "module": "Dropout", "kwargs": {"p": 0.25}},
            {"id": "head", "module": "Linear", "kwargs": {"in_features": 8, "out_features": 5}},
        ],
        "edges": [
            {"source": "deep", "target": "bend"},
            {"source": "wide", "target": "sum", "port": 0},
            {"source": "bend", "target": "sum", "port": 1},
            {"source": "sum", "target": "drop"},
            {"source": "drop", "target": "head"},
        ],
        "inputs": ["wide", "deep"],
        "outputs": ["head"],
    }
}

# 50 rows in batches of 16: the last batch of an epoch has 2 rows, fewer than 3 or 4 replicas.
# 55 rows: the last one has 7. Batch norm refuses shards of one row: 42 rows, the last has 10.
CASES: dict[str, dict[str, Any]] = {
    "momentum": {},
    "adamw clip cosine": {"optimizer": ADAMW, "data": user_data("classes", num_rows=55)},
    "dropout": {"model": "dropout_mlp", "optimizer": {"name": "adam", "lr": 0.01}},
    "batch norm": {"model": "batch_norm_mlp", "data": user_data("classes", num_rows=42)},
    "micro-batches": {
        "model": "dropout_mlp",
        "optimizer": ADAMW,
        "accumulation": {"micro_batch_size": 3, "non_finite": "skip_step"},
    },
    "tied and frozen": {"model": "everything", "optimizer": ADAMW},
    "graph": {"model": GRAPH, "optimizer": MOMENTUM, "data": user_data("classes", num_rows=55)},
}


MATRIX = [
    *[("momentum", num_replicas) for num_replicas in (1, 2)],
    ("adamw clip cosine", 3),
    ("dropout", 4),
    ("batch norm", 3),
    ("micro-batches", 2),
    ("tied and frozen", 3),
    ("graph", 4),
]
MORE = [
    *[("momentum", num_replicas) for num_replicas in (3, 4)],
    ("adamw clip cosine", 2),
    ("dropout", 2),
    ("batch norm", 1),
    ("tied and frozen", 2),
    ("graph", 3),
]


@pytest.mark.parametrize(
    ("case", "num_replicas"),
    [*MATRIX, *(pytest.param(*each, marks=pytest.mark.sweep) for each in MORE)],
)
def test_both_engines_have_the_bits_of_the_sharded_loop(
    client: Client, case: str, num_replicas: int
) -> None:
    runs = {}
    for method in METHODS:
        spec = job(**CASES[case], strategy=data_parallel(num_replicas, method))
        runs[method] = train(client, spec)
        expected = sharded_loop(spec, ALLOWED, num_replicas)
        assert_same_bits(runs[method].state, expected.state)
        assert len(runs[method].digests) == 5
        assert len(runs[method].of("MembersFormed")[0].payload["members"]) == num_replicas
        assert runs[method].status.reproducible
    assert runs["AllReduce"].status.engine == ("shm" if num_replicas > 1 else "solo")
    assert runs["AllReduce"].digests == runs["ParameterServer"].digests
    losses = [[e.payload["loss"] for e in run.of("SegmentFinished")] for run in runs.values()]
    assert losses[0] == losses[1]
    metrics = [run.status.metrics for run in runs.values()]
    assert 0 < metrics[0]["train.grad_norm"] <= metrics[0]["train.max_grad_norm"]
    assert metrics[0] == metrics[1]
    assert metrics[0].get("train.skipped_steps") == (0 if case == "micro-batches" else None)
    committed = [event.payload["metrics"] for event in runs["AllReduce"].of("SegmentCommitted")]
    assert [each["train.loss"] for each in committed] == losses[0]
    assert runs["AllReduce"].status.commits[-1].metrics == committed[-1]


@pytest.mark.parametrize("case", ["momentum", "dropout", "batch norm"])
def test_local_has_the_bits_of_the_loops(client: Client, case: str) -> None:
    spec = job(**CASES[case], strategy={"type": "Local"})
    outcome = train(client, spec)
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 1).state)
    if case == "momentum":
        assert_close(outcome.state, plain_loop(spec, ALLOWED).state, 1e-6)


@pytest.mark.parametrize(
    ("precision", "num_steps", "tolerance"), [("Full", 40, 1e-12), ("Single", 10, 1e-6)]
)
@pytest.mark.parametrize("method", METHODS)
def test_three_replicas_are_the_plain_loop_up_to_rounding(
    client: Client, method: str, precision: str, num_steps: int, tolerance: float
) -> None:
    spec = job(
        optimizer=ADAMW,
        steps=num_steps,
        checkpoint={"every": "20 steps"},
        execution={"precision": precision},
        strategy=data_parallel(3, method),
    )
    outcome = train(client, spec)
    assert_close(outcome.state, plain_loop(spec, ALLOWED).state, tolerance)
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 3).state)


@pytest.mark.parametrize("method", [*METHODS, "Local"])
def test_phases_have_the_bits_of_their_reference(client: Client, method: str) -> None:
    strategy = {"type": "Local"} if method == "Local" else data_parallel(3, method)
    phases = {
        "full_steps": 2,
        "predict_steps": 4,
        "correct_every": 3,
        # Small batches: the predictions are bad, and taken all the same.
        "max_relative_error": 100,
        "min_correlation": -1,
    }
    sections = {"optimizer": ADAMW, "weight_average": {"kind": "swa", "every": 3}}
    spec = job(strategy=strategy, phases=phases, **sections)
    run = train(client, spec)
    expected = phases_loop(spec, ALLOWED, 1 if method == "Local" else 3, 10)
    assert expected.phases == "FFPPPCPFFP"
    assert_same_bits(run.state, expected.result.state)
    assert_same_bits(run.run.state_dict("average"), expected.result.average)
    finished = [event.payload for event in run.of("SegmentFinished")]
    # The second of the five segments has predicted steps only: nobody has sent anything.
    assert [each["num_rows"] for each in finished] == [32, 0, 16, 2, 16]
    assert finished[1]["loss"] == expected.result.losses[1]
    assert run.status.metrics["train.step_ratio"] == 10 / 5
    assert run.status.metrics["train.predicted_steps"] == 5


@pytest.mark.parametrize("all_reduce", ["ring", "native"])
def test_sums_in_another_order_are_close_and_marked(client: Client, all_reduce: str) -> None:
    strategy = {**data_parallel(3), "options": {"all_reduce": all_reduce}}
    spec = job(strategy=strategy, execution={"deterministic": False})
    run = train(client, spec)
    assert run.status.engine == f"gloo {all_reduce}"
    assert not run.status.reproducible
    expected = sharded_loop(spec, ALLOWED, 3)
    for name, tensor in run.state.items():
        assert torch.allclose(tensor, expected.state[name], rtol=1e-4, atol=1e-5), name


def test_replicas_that_differ_fail_the_run(client: Client) -> None:
    run = client.submit(job("acting_models:Stray", strategy=data_parallel(2)))
    with pytest.raises(RunFailedError) as caught:
        run.result()
    status = run.status()
    assert status.phase is Phase.FAILED
    assert status.reason.startswith("the replicas differ after segment 1: worker-")
    assert status.reason in str(caught.value)
    assert status.segment == 0


def assert_close(left: Mapping[str, Tensor], right: Mapping[str, Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=tolerance)
