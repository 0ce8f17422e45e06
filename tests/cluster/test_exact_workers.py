"""The same job has the same bits on any number of workers, for both engines."""

import signal
from collections.abc import Iterator

import psutil
import pytest

from stratagem.client.local_cluster import LocalCluster
from stratagem.client.sync import Client
from stratagem.worker.reference import sharded_loop
from tests.cluster.jobs import (
    ADAMW,
    ALLOWED,
    METHODS,
    Gates,
    assert_same_bits,
    data_parallel,
    job,
    train,
)

pytestmark = pytest.mark.cluster


@pytest.fixture
def lot(exact_cluster: LocalCluster, parking: Gates) -> Iterator[Gates]:
    """All workers are back afterwards."""
    yield parking
    parking.open()
    exact_cluster.wait_ready()


def park(cluster: LocalCluster, lot: Gates, name: str) -> None:
    """Drain a worker and keep it away."""
    pid = cluster.processes[name].pid
    assert pid is not None
    process = psutil.Process(pid)
    lot.close(name)
    cluster.kill(name, signal.SIGTERM)
    process.wait(timeout=20)


def test_four_replicas_on_four_three_two_and_one_worker(
    exact_cluster: LocalCluster, client: Client, lot: Gates
) -> None:
    specs = {
        method: job("dropout_mlp", optimizer=ADAMW, strategy=data_parallel(4, method))
        for method in METHODS
    }
    expected = sharded_loop(specs["AllReduce"], ALLOWED, 4)
    digests = set()
    for num_workers in (4, 3, 2, 1):
        for spec in specs.values():
            outcome = train(client, spec)
            members = outcome.of("MembersFormed")[-1].payload["members"]
            assert len(members) == num_workers
            assert_same_bits(outcome.state, expected.state)
            digests.add(tuple(outcome.digests))
        if num_workers > 1:
            park(exact_cluster, lot, f"worker-{num_workers - 1}")
    assert len(digests) == 1
