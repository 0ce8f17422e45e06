"""Step functions over real processes that are killed, under every strategy that takes them."""

import signal
from typing import Any

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from stratagem.common.base.errors import StratagemError
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    outcome_of,
    population,
    train,
    wait_for,
)
from tests.jobs import job, user_data
from tests.reference.compressed_loop import compressed_loop
from tests.reference.gossip_loop import gossip_loop
from tests.reference.loops import federated_loop, sharded_loop
from tests.reference.phases_loop import phases_loop

pytestmark = pytest.mark.cluster

NOISY: dict[str, Any] = {
    "loss": None,
    "step": "tests.userland.steps:noisy",
    "predict": "tests.userland.steps:prediction",
    "evaluation": {"metrics": ["accuracy"]},
}


def test_a_member_killed_in_the_middle_changes_neither_bits_nor_what_is_logged(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    spec = job(
        "dropout_mlp",
        **NOISY,
        data=user_data("gated", folder=str(gates.folder)),
        accumulation={"micro_batch_size": 3},
        strategy=data_parallel(3),
    )
    gates.close("worker-1-batch-6")  # of two in each step
    run = client.submit(spec)
    wait_for(run, "SegmentCommitted")
    gates.wait_reached("worker-1-batch-6")
    exact_cluster.kill("worker-1", signal.SIGKILL)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    assert len(outcome.of("MembersFormed")) > 1
    assert outcome.status.reproducible
    expected = sharded_loop(spec, ALLOWED, 3)
    assert_same_bits(outcome.state, expected.state)
    first = 0
    for segment in outcome.of("SegmentFinished"):
        steps = expected.logged[first : segment.payload["step"]]
        first = segment.payload["step"]
        for name in ("agreement", "fit", "hits_of_0"):
            total, weight = (sum(step[name][i] for step in steps) for i in (0, 1))
            assert segment.payload["metrics"][f"train.{name}"] == total / weight
    assert {"train.fit", "test.accuracy", "test.loss"} <= outcome.status.metrics.keys()


@pytest.mark.parametrize("case", ["parameter server", "compression", "phases", "gossip"])
def test_other_exchanges_have_the_bits_of_their_loops(client: Client, case: str) -> None:
    strategy = {
        "parameter server": data_parallel(3, "ParameterServer"),
        "compression": data_parallel(3),
        "phases": data_parallel(2),
        "gossip": gossip(3),
    }[case]
    further: dict[str, dict[str, Any]] = {
        "compression": {"compression": "ternary"},
        "phases": {"phases": {"full_steps": 2, "predict_steps": 2}},
    }
    spec = job(
        "dropout_mlp", **{**NOISY, "evaluation": None, **further.get(case, {})}, strategy=strategy
    )
    state = train(client, spec).state
    match case:
        case "compression":
            expected = compressed_loop(spec, ALLOWED, 3).state
        case "phases":
            expected = phases_loop(spec, ALLOWED, 2, 10).result.state
        case "gossip":
            expected = gossip_loop(spec, ALLOWED).mean
        case _:
            expected = sharded_loop(spec, ALLOWED, 3).state
    assert_same_bits(state, expected)


def test_federated_clients_have_the_bits_of_the_loop(client: Client) -> None:
    spec = federated("dropout_mlp", **NOISY)
    outcome = train(client, spec)
    assert_same_bits(outcome.state, federated_loop(spec, ALLOWED).state)
    assert {"train.fit", "test.accuracy"} <= outcome.status.metrics.keys()


def test_a_population_ends_as_one_with_the_loss_that_the_step_computes(client: Client) -> None:
    ends = [
        sorted(train(client, population(**sections)).digests)
        for sections in (
            {"loss": "cross_entropy"},
            {
                "loss": None,
                "step": "tests.userland.steps:plain",
                "predict": "tests.userland.steps:logits",
            },
        )
    ]
    assert ends[0] == ends[1]


def test_a_step_that_calls_backward_fails_with_the_reason(client: Client) -> None:
    spec = job("mlp", loss=None, step="tests.userland.steps:going_backward")
    with pytest.raises(StratagemError, match="does not call backward"):
        train(client, spec)
