"""ModelParallel over real processes has the bits of one process, whatever the cut."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.client.sdk.run_handle import RunHandle
from stratagem.client.sdk.views import Phase
from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    Cut,
    Gates,
    assert_same_bits,
    data_parallel,
    model_parallel,
    outcome_of,
    population,
    replicated,
    train,
    wait_for,
)
from tests.crash.rig import until
from tests.jobs import LOSSES, job, user_data, user_model
from tests.reference.loops import sharded_loop

pytestmark = pytest.mark.cluster

GRAPH: dict[str, Any] = {
    "graph": {
        "nodes": [
            {"id": "in", "module": "Linear", "kwargs": {"in_features": 12, "out_features": 8}},
            {"id": "bend", "module": "Tanh"},
            {"id": "norm", "module": "BatchNorm1d", "kwargs": {"num_features": 8}},
            {"id": "drop", "module": "Dropout", "kwargs": {"p": 0.25}},
            {"id": "sum", "module": "Add"},
            {"id": "left", "module": "Linear", "kwargs": {"in_features": 8, "out_features": 5}},
            {"id": "right", "module": "Linear", "kwargs": {"in_features": 8, "out_features": 3}},
        ],
        "edges": [
            {"source": "in", "target": "bend"},
            {"source": "bend", "target": "norm"},
            {"source": "norm", "target": "drop"},
            {"source": "drop", "target": "sum", "port": 0},
            {"source": "bend", "target": "sum", "port": 1},
            {"source": "sum", "target": "left"},
            {"source": "sum", "target": "right"},
        ],
        "outputs": ["left", "right"],
    }
}
GRAPH_CUT = {
    "in bend": "worker-0",
    "norm drop": "worker-1",
    "sum left": "worker-2",
    "right": "tag:large",
}
SEQUENTIAL = {"0 1": "worker-0", "2 3": "worker-1"}
TWO_EACH = {"0": "worker-0", "1 2": "worker-1", "3 4 5": "worker-0", "6 7": "worker-1"}
TWO_KINDS = [("0 1", "tag:slow"), ("2 3", "tag:fast")]
ONE_WORKER = {"0 1": "worker-3", "2 3": "worker-3"}
UNEVEN = user_data("classes", num_rows=55)
WHOLE = 2**62


def anywhere(*partitions: str) -> list[tuple[str, str]]:
    return [(ids, "tag:any") for ids in partitions]


def pipeline(cut: Cut, rows: int = 3, schedule: str | None = None) -> dict[str, Any]:
    return model_parallel(cut, schedule=schedule, protocol="Pipeline", micro_batch_size=rows)


# Batches have 16 rows, the last of an epoch has 2 (of 50 rows) or 7 (of 55), and micro-batches 3
# or 4: some are smaller than the others.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "direct": ({"model": "dropout_mlp"}, model_parallel(SEQUENTIAL), WHOLE),
    "store": (
        {"model": "dropout_mlp", "accumulation": {"micro_batch_size": 5}},
        model_parallel(SEQUENTIAL, protocol="DataStore"),
        5,
    ),
    "auto": ({"model": "batch_norm_mlp", "data": UNEVEN}, pipeline(SEQUENTIAL, 4), 4),
    "eager": ({"model": "dropout_mlp", "optimizer": ADAMW}, pipeline(SEQUENTIAL, 3, "eager"), 3),
    "gpipe": ({"model": "dropout_mlp"}, pipeline(SEQUENTIAL, 3, "gpipe"), 3),
    "zero bubble": ({"model": "dropout_mlp"}, pipeline(SEQUENTIAL, 3, "zero_bubble"), 3),
    "graph": (
        {"model": GRAPH, "loss": f"{LOSSES}:two_heads", "optimizer": ADAMW, "data": UNEVEN},
        pipeline(GRAPH_CUT, 4),
        4,
    ),
    "interleaved": ({"model": "deep"}, pipeline(TWO_EACH, 4), 4),
    "one worker": ({"model": "dropout_mlp"}, pipeline(ONE_WORKER), 3),
}


@pytest.mark.parametrize("case", CASES)
def test_every_cut_has_the_bits_of_one_process(client: Client, case: str) -> None:
    sections, strategy, rows = CASES[case]
    spec = job(**sections, strategy=strategy)
    outcome = train(client, spec)
    expected = sharded_loop(spec, ALLOWED, 1, micro_batch_size=rows)
    assert_same_bits(outcome.state, expected.state)
    assert len(outcome.digests) == 5
    assert outcome.status.reproducible
    schedule = {"auto": r"(1f1b|eager) \(auto\)", "eager": "eager"}.get(case)
    assert schedule is None or re.fullmatch(f"pipeline/shm {schedule}", outcome.status.engine)


DEEP = anywhere("0 1 2", "3 4 5 6 7")


def test_nothing_is_left_in_the_store(client: Client, activations: Path) -> None:
    train(client, job("dropout_mlp", strategy=model_parallel(SEQUENTIAL, protocol="DataStore")))
    until(lambda: not list(activations.iterdir()), "the folder is empty")


REPLICATED: dict[str, tuple[dict[str, Any], int, dict[str, Any], int]] = {
    "2 x 2": ({"model": "dropout_mlp", "optimizer": ADAMW}, 2, pipeline(anywhere("0 1", "2 3")), 4),
    "2 x 2, three shards": ({"model": "dropout_mlp"}, 3, pipeline(anywhere("0 1", "2 3")), 4),
    "1 x 2": ({"model": "batch_norm_mlp", "data": UNEVEN}, 2, pipeline(SEQUENTIAL, 4), 2),
    "1 x 2, one shard": ({"model": "dropout_mlp"}, 1, pipeline(SEQUENTIAL, 4), 2),
    "4 x 1": ({"model": "dropout_mlp"}, 4, pipeline(anywhere("0 1 2 3")), 4),
    "2 x 2, direct": ({"model": "deep", "data": UNEVEN}, 2, model_parallel(DEEP), 4),
    "2 x 2, store": ({}, 2, model_parallel(anywhere("0", "1 2"), protocol="DataStore"), 4),
}
BOTH_WAYS = [
    *((case, "AllReduce") for case in REPLICATED),
    *((case, "ParameterServer") for case in REPLICATED if case != "2 x 2, direct"),
]


@pytest.mark.parametrize(("case", "method"), BOTH_WAYS)
def test_replicas_of_pipelines_have_the_bits_of_the_sharded_loop(
    client: Client, case: str, method: str
) -> None:
    sections, num_replicas, inner, num_workers = REPLICATED[case]
    spec = job(**sections, strategy=replicated(num_replicas, inner, method))
    outcome = train(client, spec)
    assert (" over server" in outcome.status.engine) == (method == "ParameterServer")
    rows = inner["communication"].get("micro_batch_size", WHOLE)
    expected = sharded_loop(spec, ALLOWED, num_replicas, micro_batch_size=rows)
    assert_same_bits(outcome.state, expected.state)
    assert len(outcome.of("MembersFormed")[0].payload["members"]) == num_workers


def test_evaluation_is_that_of_one_process(client: Client) -> None:
    evaluation = {"split": "test", "every": "2 steps", "metrics": ["accuracy"], "batch_size": 8}
    found = []
    for strategy in (
        data_parallel(1),
        pipeline(SEQUENTIAL, 16),
        replicated(2, pipeline(anywhere("0 1", "2 3"), 8)),
    ):
        spec = job("dropout_mlp", evaluation=evaluation, strategy=strategy)
        found.append([e.payload["metrics"] for e in train(client, spec).of("SegmentFinished")])
    assert found[0] == found[1]
    assert len(found[0]) == 5
    assert [each.keys() for each in found[2]] == [each.keys() for each in found[0]]


def test_a_population_of_pipelines_is_one_of_whole_models(client: Client) -> None:
    """Members train in turn on the same stages, and copy each other's states."""
    found = []
    for inner in ({"type": "Local"}, model_parallel(TWO_KINDS)):
        spec = population(2, 2, options={"inner": inner}, model=user_model("dropout_mlp"))
        found.append(train(client, spec))
    assert_same_bits(found[0].state, found[1].state)
    assert len(found[1].of("GenerationClosed")) == 2


# ---- faults ----


def stuck(
    client: Client,
    gates: Gates,
    num_replicas: int,
    inner: dict[str, Any] | None = None,
    method: str = "AllReduce",
) -> tuple[JobSpec, RunHandle, str]:
    """A run in the middle of a step, after its first commit, and who holds the last stage (of the
    first replica): there everything waits until the gates are opened."""
    inner = inner or pipeline(TWO_KINDS, 4)
    spec = job(
        "dropout_mlp",
        data=user_data("gated", folder=str(gates.folder)),
        optimizer=ADAMW,
        strategy=inner if num_replicas == 1 else replicated(2, inner, method, min_replicas=2),
    )
    gates.close("worker-1-batch-10", "worker-3-batch-10")
    run = client.submit(spec)
    formed = wait_for(run, "MembersFormed")[0].payload["members"]
    wait_for(run, "SegmentCommitted")
    return spec, run, formed[1]["worker_id"]


@pytest.mark.parametrize(
    ("num_replicas", "method"),
    [
        pytest.param(1, "AllReduce", marks=pytest.mark.sweep),
        (2, "AllReduce"),
        (2, "ParameterServer"),
    ],
)
def test_a_killed_stage_returns_all_to_the_last_commit(
    exact_cluster: LocalCluster, client: Client, gates: Gates, num_replicas: int, method: str
) -> None:
    spec, run, victim = stuck(client, gates, num_replicas, method=method)
    exact_cluster.kill(victim)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    lost = [
        e for e in outcome.of("MembersFormed") if " lost" in e.sentence and victim in e.sentence
    ]
    assert len(lost) == 1
    assert outcome.status.reproducible
    expected = sharded_loop(spec, ALLOWED, num_replicas, micro_batch_size=4)
    assert_same_bits(outcome.state, expected.state)


def test_a_killed_stage_behind_a_store(
    exact_cluster: LocalCluster, client: Client, gates: Gates, activations: Path
) -> None:
    """Nobody is connected to it; what it has left behind is deleted."""
    store = model_parallel(TWO_KINDS, protocol="DataStore")
    spec, run, victim = stuck(client, gates, 1, store)
    exact_cluster.kill(victim)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 1, micro_batch_size=WHOLE).state)
    until(lambda: not list(activations.iterdir()), "the folder is empty")


def test_a_coordinator_that_sums_for_pipelines_is_killed(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    spec, run, _ = stuck(client, gates, 2, method="ParameterServer")
    exact_cluster.kill("coordinator")
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 2, micro_batch_size=4).state)


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_a_stage_that_drains_leaves_after_its_step(
    exact_cluster: LocalCluster, client: Client, gates: Gates, num_replicas: int
) -> None:
    spec, run, victim = stuck(client, gates, num_replicas)
    exact_cluster.kill(victim, signal.SIGTERM)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    expected = sharded_loop(spec, ALLOWED, num_replicas, micro_batch_size=4)
    assert_same_bits(outcome.state, expected.state)


@pytest.mark.sweep
def test_a_frozen_stage_is_replaced(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    """The others wait for it until its heartbeats are missed."""
    spec, run, victim = stuck(client, gates, 1)
    exact_cluster.kill(victim, signal.SIGSTOP)
    try:
        found = wait_for(run, "MembersFormed", where=lambda e: f"{victim} lost" in e.sentence)
        members = [each["worker_id"] for each in found[0].payload["members"]]
        assert {members[1], victim} == {"worker-1", "worker-3"}
        gates.open()
        outcome = outcome_of(run)
    finally:
        exact_cluster.kill(victim, signal.SIGCONT)
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 1, micro_batch_size=4).state)
    # It has let go of its torch thread: runs that need all four go through it.
    again = train(client, job("dropout_mlp", strategy=replicated(2, pipeline(TWO_KINDS))))
    assert len(again.digests) == 5


# ---- what cannot be trained ----


def test_an_error_in_one_stage_ends_the_run_with_it(client: Client) -> None:
    spec = job("dropout_mlp", loss=f"{LOSSES}:broken_loss", strategy=pipeline(SEQUENTIAL))
    run = client.submit(spec)
    with pytest.raises(UserCodeError) as caught:
        run.result()
    assert run.status().phase is Phase.FAILED
    assert caught.value.type == "ValueError"
    assert caught.value.message.startswith("labels are upside down; the loss was called with (")
    assert (caught.value.worker_id, caught.value.activity) == ("worker-1", "training step 1")


def test_partitions_that_do_not_tile_a_model_of_the_workers(client: Client) -> None:
    cut = {"0 1": "worker-0", "2": "worker-1"}
    with pytest.raises(UserCodeError, match="'3': claimed by no partition; every node must be"):
        client.submit(job("dropout_mlp", strategy=pipeline(cut))).result()
