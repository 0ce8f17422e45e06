"""Processes that read rows, killed and under every way to train and evaluate: no bit is theirs."""

import signal
from typing import Any

import psutil
import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.job import JobSpec
from tests.cluster.jobs import (
    ALLOWED,
    Gates,
    assert_same_bits,
    data_parallel,
    federated,
    outcome_of,
    population,
    wait_for,
)
from tests.jobs import job, user_data
from tests.patience import PATIENCE_S
from tests.reference.loops import sharded_loop

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("processes that read rows ahead change no bit, also when they are killed"),
]

COLLATE = "tests.userland.data:jittered"
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
        "Federated": federated("dropout_mlp", num_clients=2, **sections, batch_size=6),
        "PopulationBased": population(
            2, 2, model="dropout_mlp", **{**sections, "evaluation": best}
        ),
        "evaluation only": job(
            strategy=data_parallel(2), execution={"gradient": "None"}, **{**sections, **nothing}
        ),
    }


def test_readers_change_no_bit_of_any_strategy(client: Client) -> None:
    """All runs share the workers, and so the readers that these allow, at the same time."""
    noisy = {**user_data("noisy_rows", num_rows=40), "collate": COLLATE}
    without = {name: client.submit(each) for name, each in jobs(noisy).items()}
    ahead = {**noisy, "readers": 1, "prefetch": 3}
    with_readers = {name: client.submit(each) for name, each in jobs(ahead).items()}
    for name, run in with_readers.items():
        found, expected = outcome_of(run), outcome_of(without[name])
        assert found.status.reproducible, name
        assert sorted(found.digests) == sorted(expected.digests), name  # members have no order
        assert_same_bits(found.state, expected.state)
        assert found.status.metrics == expected.status.metrics, name
        assert found.status.metrics["test.accuracy"] >= 0, name
        assert name == "evaluation only" or len(found.digests) > 1


def readers_of(cluster: LocalCluster, worker: str) -> list[psutil.Process]:
    process = psutil.Process(cluster.processes[worker].pid)
    return [
        each for each in process.children() if "stratagem.worker.data.reader_loop" in each.cmdline()
    ]


def test_a_reader_and_a_worker_with_readers_killed_change_no_bit(
    exact_cluster: LocalCluster, client: Client, gates: Gates, lot: Gates
) -> None:
    data = {**user_data("augmented", folder=str(gates.folder)), "collate": COLLATE}
    spec = job(
        "dropout_mlp",
        data={**data, "readers": 1, "prefetch": 3},
        accumulation={"micro_batch_size": 3},
        strategy=data_parallel(2),
    )
    gates.close("row-5")  # of each process: a worker itself reads four when it loads
    run = client.submit(spec)
    gates.wait_reached("row-5")
    (formed,) = wait_for(run, "MembersFormed")
    first, second = (member["worker_id"] for member in formed.payload["members"])
    readers_of(exact_cluster, first)[0].kill()
    left = readers_of(exact_cluster, second)
    exact_cluster.kill(second, signal.SIGKILL)
    psutil.wait_procs(left, timeout=PATIENCE_S)
    assert not [each for each in left if each.is_running() and each.status() != "zombie"]
    gates.open()
    outcome = outcome_of(run)
    assert len(outcome.of("MembersFormed")) > 1
    assert outcome.status.reproducible
    assert_same_bits(outcome.state, sharded_loop(spec, ALLOWED, 2).state)
