"""ModelParallel over real processes has the bits of one process, whatever the cut."""

import signal
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client, RunHandle
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
from tests.jobs import job, user_data, user_model
from tests.reference.loops import sharded_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("stages in any cut have the bits of one process, and leave no activation"),
]

SEQUENTIAL = {"0 1": "worker-0", "2 3": "worker-1"}
TWO_EACH = {"0": "worker-0", "1 2": "worker-1", "3 4 5": "worker-0", "6 7": "worker-1"}
TWO_KINDS = [("0 1", "tag:slow"), ("2 3", "tag:fast")]
UNEVEN = user_data("classes", num_rows=55)
WHOLE = 2**62


def anywhere(*partitions: str) -> list[tuple[str, str]]:
    return [(ids, "tag:any") for ids in partitions]


def pipeline(cut: Cut, rows: int = 3, schedule: str | None = None) -> dict[str, Any]:
    return model_parallel(cut, schedule=schedule, protocol="Pipeline", micro_batch_size=rows)


# Batches have 16 rows, the last of an epoch has 2 (of 50 rows) or 7 (of 55), and micro-batches 3
# or 4: some are smaller than the others.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "zero bubble": ({"model": "dropout_mlp"}, pipeline(SEQUENTIAL, 3, "zero_bubble"), 3),
    "interleaved": ({"model": "deep"}, pipeline(TWO_EACH, 4), 4),
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


REPLICATED: dict[str, tuple[dict[str, Any], int, dict[str, Any], int]] = {
    "1 x 2": ({"model": "batch_norm_mlp", "data": UNEVEN}, 2, pipeline(SEQUENTIAL, 4), 2),
    "4 x 1": ({"model": "dropout_mlp"}, 4, pipeline(anywhere("0 1 2 3")), 4),
}
BOTH_WAYS = [
    ("4 x 1", "AllReduce"),
    ("1 x 2", "ParameterServer"),
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
) -> tuple[JobSpec, RunHandle, str]:
    """A run in the middle of a step, after its first commit, and who holds the last stage (of the
    first replica): there everything waits until the gates are opened."""
    inner = inner or pipeline(TWO_KINDS, 4)
    spec = job(
        "dropout_mlp",
        data=user_data("gated", folder=str(gates.folder)),
        optimizer=ADAMW,
        strategy=inner if num_replicas == 1 else replicated(2, inner, min_replicas=2),
    )
    gates.close("worker-1-batch-10", "worker-3-batch-10")
    run = client.submit(spec)
    formed = wait_for(run, "MembersFormed")[0].payload["members"]
    wait_for(run, "SegmentCommitted")
    return spec, run, formed[1]["worker_id"]


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


@pytest.mark.parametrize("num_replicas", [1, 2])
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
