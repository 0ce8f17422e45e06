"""One cluster for all tests of a module, and its logs beside every failure."""

from collections.abc import Iterator

import pytest

from tests.cluster.jobs import Gates, gates_in
from tests.crash.failure_logs import LOGS, pytest_runtest_makereport
from tests.crash.rig import Rig, cluster_with_failpoints, quick_restarts

__all__ = ["pytest_runtest_makereport", "quick_restarts", "rig", "shared_rig"]


@pytest.fixture(scope="session")
def shared_rig() -> Iterator[Rig]:
    # States of one worker are streamed, as between machines.
    cluster = cluster_with_failpoints(worker_arguments={"worker-1": ["--no-open-files"]})
    with cluster, cluster.client() as client:
        yield Rig(cluster, client)


@pytest.fixture
def rig(shared_rig: Rig, request: pytest.FixtureRequest) -> Rig:
    """The cluster with all its processes in their places."""
    request.node.stash[LOGS] = shared_rig.logs
    shared_rig.settle()
    return shared_rig


@pytest.fixture
def gates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gates]:
    """For jobs of `gated`: what stands at one of them is hit in its middle by what a test does."""
    with gates_in(tmp_path_factory.mktemp("gates")) as gates:
        yield gates
