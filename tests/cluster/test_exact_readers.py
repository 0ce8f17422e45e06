"""Reader processes under every way to train and to evaluate, on one cluster: no bit is theirs."""

from typing import Any

import pytest

from stratagem.client.sdk.blocking_client import Client
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    assert_same_bits,
    data_parallel,
    federated,
    gossip,
    outcome_of,
    population,
)
from tests.jobs import job, user_data

pytestmark = [pytest.mark.cluster, pytest.mark.sweep]

SECTIONS: dict[str, Any] = {
    "evaluation": {"split": "test", "metrics": ["accuracy"], "batch_size": 5},
    "accumulation": {"micro_batch_size": 3},
}


def jobs(data: dict[str, Any]) -> dict[str, JobSpec]:
    """One of each kind. The rows of all of them draw from all generators, and so does a batch."""
    sections: dict[str, Any] = {**SECTIONS, "data": data}
    best = {**SECTIONS["evaluation"], "best": "loss", "mode": "min"}
    nothing = dict.fromkeys(("optimizer", "checkpoint", "steps", "batch_size", "accumulation"))
    return {
        "AllReduce": job("dropout_mlp", strategy=data_parallel(2), **sections),
        "ParameterServer": job(
            "dropout_mlp", strategy=data_parallel(2, "ParameterServer"), **sections
        ),
        "Decentralized": job("dropout_mlp", strategy=gossip(3), **sections),
        "Federated": federated("dropout_mlp", num_clients=3, **sections, batch_size=6),
        "PopulationBased": population(model="dropout_mlp", **{**sections, "evaluation": best}),
        "evaluation only": job(
            strategy=data_parallel(2), execution={"gradient": "None"}, **{**sections, **nothing}
        ),
    }


def test_readers_change_no_bit_of_any_strategy(client: Client) -> None:
    """All runs share the workers, and so the readers that these allow, at the same time."""
    noisy = {**user_data("noisy_rows", num_rows=40), "collate": "tests.userland.data:jittered"}
    without = {name: client.submit(each) for name, each in jobs(noisy).items()}
    ahead = {**noisy, "readers": 2, "prefetch": 3}
    with_readers = {name: client.submit(each) for name, each in jobs(ahead).items()}
    for name, run in with_readers.items():
        found, expected = outcome_of(run), outcome_of(without[name])
        assert found.status.reproducible, name
        assert sorted(found.digests) == sorted(expected.digests), name  # members have no order
        assert_same_bits(found.state, expected.state)
        assert found.status.metrics == expected.status.metrics, name
        assert found.status.metrics["test.accuracy"] >= 0, name
        assert name == "evaluation only" or len(found.digests) > 1
