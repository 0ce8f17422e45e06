"""One cluster for all tests of a module, and its logs beside every failure."""

from collections.abc import Generator, Iterator

import pytest

from stratagem.client.local_cluster import LocalCluster
from tests.crash.rig import NUM_WORKERS, ROOT, Rig

_RIG = pytest.StashKey[Rig]()


@pytest.fixture(scope="session")
def shared_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    options = {"workers": NUM_WORKERS, "threads": 1, "failpoints": True, "import_path": (ROOT,)}
    with LocalCluster(**options) as cluster, cluster.client() as client:  # type: ignore[arg-type]
        yield Rig(cluster, client)


@pytest.fixture
def rig(shared_rig: Rig, request: pytest.FixtureRequest) -> Rig:
    """The cluster with all its processes in their places."""
    request.node.stash[_RIG] = shared_rig
    shared_rig.settle()
    return shared_rig


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    rig = item.stash.get(_RIG, None)
    if report.failed and rig is not None:
        report.sections += [(f"log of {name}", text) for name, text in rig.logs()]
    return report
