"""One browser for all tests of a module that open the page in one, and one cluster for all modules.

A browser is not for all modules: playwright keeps an event loop running, and tests beside them have
their own.
"""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.dashboard.page_cluster import PageCluster, jobs, page_cluster

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is here: none of {', '.join(NAMES)}")
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--js-flags=--expose-gc"]
        opened = started.chromium.launch(executable_path=found, args=arguments)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageCluster]:
    """A cluster that trains a run of each strategy, all at the same time."""
    with page_cluster(tmp_path_factory.mktemp("page")) as made:
        for name, spec in jobs().items():
            made.client.submit(spec, name)
        yield made
