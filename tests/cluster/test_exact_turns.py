"""Several optimizers that take turns, over real processes that are killed between two turns."""

import signal
from typing import Any

import pytest

from stratagem.client.local.local_cluster import LocalCluster
from stratagem.client.sdk.blocking_client import Client
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    assert_same_bits,
    data_parallel,
    federated,
    outcome_of,
    population,
    train,
    wait_for,
)
from tests.jobs import job, user_data
from tests.reference.client_turns import federated_turns_loop
from tests.reference.turns_loop import turns_loop

pytestmark = pytest.mark.cluster

GAN: dict[str, Any] = {
    "model": {"entrypoint": "tests.userland.gans:Gan"},
    "loss": None,
    "optimizer": None,
    "turns": [
        {
            "name": "d",
            "params": "disc.*",
            "step": "tests.userland.gans:step_disc",
            "optimizer": {"name": "adam", "lr": 0.02},
        },
        {
            "name": "g",
            "params": "gen.*",
            "step": "tests.userland.gans:step_gen",
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        },
    ],
}


def test_a_member_killed_between_two_turns_changes_no_bit(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    data = user_data("gated", folder=str(gates.folder))
    spec = job(**GAN, data=data, strategy=data_parallel(3))
    gates.close("worker-1-batch-6")  # the second turn of step 3
    run = client.submit(spec)
    wait_for(run, "SegmentCommitted")
    gates.wait_reached("worker-1-batch-6")
    exact_cluster.kill("worker-1", signal.SIGKILL)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    assert len(outcome.of("MembersFormed")) > 1
    expected = turns_loop(spec, ALLOWED, 3, 10)
    assert_same_bits(outcome.state, expected.state)
    first = 0
    for segment in outcome.of("SegmentFinished"):
        steps = expected.logged[first : segment.payload["step"]]
        first = segment.payload["step"]
        for name in ("loss.d", "loss.g"):
            total, weight = (sum(step[name][i] for step in steps) for i in (0, 1))
            assert segment.payload["metrics"][f"train.{name}"] == total / weight


def test_clients_of_which_one_is_killed_between_two_turns(
    exact_cluster: LocalCluster, client: Client, gates: Gates
) -> None:
    """In the first step of the second round, before the generator's turn."""
    spec = federated(
        **GAN,
        data=user_data("gated_clients", folder=str(gates.folder)),
        aggregation={"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.01},
    )
    gates.close("worker-1-client1-6")  # of two steps of two turns in a round
    run = client.submit(spec)
    wait_for(run, "RoundClosed")
    gates.wait_reached("worker-1-client1-6")
    exact_cluster.kill("worker-1", signal.SIGKILL)
    gates.open()
    outcome = outcome_of(run)
    exact_cluster.wait_ready()
    assert_same_bits(outcome.state, federated_turns_loop(spec, ALLOWED).state)


def test_a_population_varies_the_rates_of_the_turns(client: Client) -> None:
    space = {
        "turns.d.optimizer.lr": {"low": 0.001, "high": 0.1, "scale": "log"},
        "turns.g.optimizer.momentum": {"low": 0.0, "high": 0.9},
    }
    spec = population(**GAN, search_space=space, evaluation={"best": "loss", "mode": "min"})
    assert train(client, spec).state.keys() >= {"gen.0.weight", "disc.0.weight"}
