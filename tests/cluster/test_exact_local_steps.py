"""Local steps over real processes have the bits of the reference, whoever owns which replicas."""

import math
from typing import Any

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.common.base.errors import InvalidInputError
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    APART,
    METHODS,
    Gates,
    Outcome,
    assert_same_bits,
    data_parallel,
    outcome_of,
    park,
    train,
    wait_for,
)
from tests.jobs import job, user_data
from tests.reference.local_steps_loop import LocalStepsResult, local_steps_loop

pytestmark = pytest.mark.cluster

# 10 steps in rounds of 3: the last round has one step.
MEAN = {"name": "mean"}
MATRIX = [
    ("momentum", 4, 3, {}, "AllReduce"),
    ("adamw clip cosine", 4, 2, {"outer": MEAN}, "AllReduce"),
    ("dropout", 3, 5, {"outer": {"name": "nesterov", "lr": 0.5, "momentum": 0.0}}, "AllReduce"),
    ("batch norm", 3, 3, {}, "AllReduce"),
    ("tied and frozen", 2, 3, {}, "AllReduce"),
    ("momentum", 1, 3, {}, "AllReduce"),
    ("dropout", 7, 3, {"outer": MEAN}, "AllReduce"),
    ("adamw clip cosine", 4, 3, {}, "ParameterServer"),
    ("batch norm", 3, 5, {"outer": MEAN}, "ParameterServer"),
    ("adamw clip cosine", 4, 3, {"outer_bits": 8}, "AllReduce"),
    ("dropout", 4, 2, {"outer_bits": 4}, "ParameterServer"),
    ("adamw clip cosine", 4, 4, {"fragments": 2, "overlap_steps": 1}, "AllReduce"),
    ("batch norm", 3, 4, {"fragments": 4, "overlap_steps": 1, "outer_bits": 8}, "AllReduce"),
    ("dropout", 3, 3, {"overlap_steps": 2, "mix": 0.25}, "AllReduce"),
]


def local_steps(
    num_replicas: int, count: int, method: str = "AllReduce", **options: Any
) -> dict[str, Any]:
    return {**data_parallel(num_replicas, method), "options": {"local_steps": count, **options}}


def spec_of(case: str, strategy: dict[str, Any], **sections: Any) -> Any:
    every = strategy["options"]["local_steps"]
    return job(
        **{**APART[case], "checkpoint": {"every": f"{every} steps"}, **sections},
        strategy=strategy,
    )


def assert_is(outcome: Outcome, expected: LocalStepsResult) -> None:
    assert_same_bits(outcome.state, expected.state)
    losses = [event.payload["loss"] for event in outcome.of("SegmentFinished")]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
    if len(losses) == len(expected.losses):  # with an overlap a join's loss is in two segments
        assert losses == pytest.approx(expected.losses, rel=1e-12)


@pytest.mark.parametrize(("case", "num_replicas", "count", "options", "method"), MATRIX)
def test_what_replicas_have_in_common_has_the_bits_of_the_loop(
    client: Client, case: str, num_replicas: int, count: int, options: dict[str, Any], method: str
) -> None:
    spec = spec_of(case, local_steps(num_replicas, count, method, **options))
    outcome = train(client, spec)
    expected = local_steps_loop(spec, ALLOWED)
    assert_is(outcome, expected)
    assert len(outcome.digests) == -(-10 // count)
    assert outcome.status.reproducible


@pytest.mark.sweep
def test_four_replicas_on_four_three_two_one_workers(
    exact_cluster: LocalCluster, client: Client, lot: Gates
) -> None:
    specs = [
        spec_of(case, local_steps(4, count, method))
        for case, count, method in (
            ("dropout", 2, "AllReduce"),
            ("batch norm", 5, "AllReduce"),
            ("adamw clip cosine", 3, "ParameterServer"),
        )
    ]
    expected = [local_steps_loop(spec, ALLOWED) for spec in specs]
    digests: list[set[tuple[str, ...]]] = [set() for _ in specs]
    metrics: list[set[str]] = [set() for _ in specs]
    for num_workers in (4, 3, 2, 1):
        for index, spec in enumerate(specs):
            outcome = train(client, spec)
            members = outcome.of("MembersFormed")[-1].payload["members"]
            assert len(members) == num_workers
            assert_is(outcome, expected[index])
            digests[index].add(tuple(outcome.digests))
            finished = [event.payload for event in outcome.of("SegmentFinished")]
            metrics[index].add(str([(each["loss"], each["metrics"]) for each in finished]))
        if num_workers > 1:
            park(exact_cluster, lot, f"worker-{num_workers - 1}")
    assert [len(each) for each in digests] == [1] * len(specs)
    assert [len(each) for each in metrics] == [1] * len(specs)


@pytest.mark.sweep
@pytest.mark.parametrize("method", METHODS)
def test_killed_worker_returns_all_replicas_to_the_last_commit(
    exact_cluster: LocalCluster, client: Client, gates: Gates, method: str
) -> None:
    """Worker-1 dies inside step 6, in segment 3, between two joins."""
    spec = job(
        "dropout_mlp",
        optimizer=ADAMW,
        data=user_data("gated", folder=str(gates.folder)),
        strategy=local_steps(4, 2, method),
    )
    gates.close("worker-1-batch-6")
    run = client.submit(spec)
    wait_for(run, "SegmentCommitted", 2)
    exact_cluster.kill("worker-1")
    wait_for(run, "MembersFormed", where=lambda event: event.payload["membership"] > 1)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    assert_is(outcome, local_steps_loop(spec, ALLOWED))
    segments = [event.payload["segment"] for event in outcome.of("SegmentCommitted")]
    assert segments == [1, 2, 3, 4, 5]
    assert outcome.status.reproducible


def test_replicas_are_evaluated_where_they_are_joined(client: Client) -> None:
    evaluation = {"split": "train", "metrics": ["accuracy"]}
    spec = spec_of("momentum", local_steps(2, 4), checkpoint=None, evaluation=evaluation)
    outcome = train(client, spec)
    steps = [event.payload["step"] for event in outcome.of("SegmentFinished")]
    assert steps == [4, 8, 10]
    assert all("train.accuracy" in e.payload["metrics"] for e in outcome.of("SegmentFinished"))
    assert_is(outcome, local_steps_loop(spec, ALLOWED))


def test_evaluation_between_two_joins_is_refused_at_submit(client: Client) -> None:
    with pytest.raises(InvalidInputError, match=r"evaluation.every: '6 steps' is not allowed.*"):
        client.submit(
            spec_of(
                "momentum",
                local_steps(2, 4),
                checkpoint=None,
                evaluation={"split": "train", "every": "6 steps", "metrics": ["accuracy"]},
            )
        )
