"""One browser and one cluster for all tests that open the page in one."""

from collections.abc import Iterator

import pytest

from tests.browser import browser
from tests.client.dashboard.page_cluster import PageCluster, jobs, page_cluster

__all__ = ["browser"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageCluster]:
    """A cluster that trains a run of each strategy, all at the same time."""
    with page_cluster(tmp_path_factory.mktemp("page")) as made:
        for name, spec in jobs().items():
            made.client.submit(spec, name)
        yield made
