"""One cluster of real processes for all tests of this folder, and its client."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from tests.cluster.jobs import Gates, gates_in
from tests.crash.rig import quick_restarts
from tests.jobs import ALLOW
from tests.repository import ROOT

__all__ = ["activations", "client", "exact_cluster", "parking", "quick_restarts"]

PARKABLE_WORKER = Path(__file__).with_name("parkable_worker.py")


@pytest.fixture(scope="session")
def parking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gates]:
    """Close the gate of a worker's name, and it stays away once it has ended."""
    with gates_in(tmp_path_factory.mktemp("parking")) as gates:
        yield gates


@pytest.fixture(scope="session")
def activations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workers' object store."""
    return tmp_path_factory.mktemp("activations")


@pytest.fixture(scope="session")
def exact_cluster(
    tmp_path_factory: pytest.TempPathFactory, parking: Gates, activations: Path
) -> Iterator[LocalCluster]:
    """Four workers; worker-1 and worker-3 are fast, worker-3 is also large. To and from these two
    states are streamed, as between machines."""
    with LocalCluster(
        workers=4,
        threads=1,
        data_dir=tmp_path_factory.mktemp("exact"),
        import_path=[ROOT],
        allow=[ALLOW, "examples.*:*"],
        programs={
            "coordinator": [sys.executable, "-m", "stratagem.coordinator"],
            "worker": [sys.executable, str(PARKABLE_WORKER)],
        },
        environment={
            "TEST_PARKING": str(parking.folder),
            "STRATAGEM_WORKER_METRICS_PORT": "0",
            "STRATAGEM_COORDINATOR_METRICS_PORT": "0",
            "STRATAGEM_WORKER_LOG_JSON": "true",
            "STRATAGEM_COORDINATOR_LOG_JSON": "true",
            "STRATAGEM_WORKER_ACTIVATION_STORE": f"file://{activations}",
        },
        worker_arguments={
            "worker-0": ["--tags", "any,slow,stage"],
            "worker-1": ["--tags", "any,fast,stage", "--no-open-files"],
            "worker-2": ["--tags", "any,slow"],
            "worker-3": ["--tags", "any,fast,large", "--no-open-files"],
        },
    ) as cluster:
        yield cluster
        for name in cluster.processes:
            assert not crashes_of(cluster.folder / "logs" / f"{name}.log"), name


def crashes_of(log: Path) -> list[str]:
    """What Python said in a process that ended by a defect; what the log itself says is JSON.

    Runs survive that, so nobody else would notice.
    """
    lines = [each for each in log.read_text().splitlines() if not each.startswith("{")]
    return lines if any("Traceback (most recent call last)" in each for each in lines) else []


@pytest.fixture(scope="session")
def client(exact_cluster: LocalCluster) -> Iterator[Client]:
    with exact_cluster.client() as client:
        yield client


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    with gates_in(tmp_path) as gates:
        yield gates


@pytest.fixture
def lot(exact_cluster: LocalCluster, parking: Gates) -> Iterator[Gates]:
    """All workers are back afterwards."""
    yield parking
    parking.open()
    exact_cluster.wait_ready()
