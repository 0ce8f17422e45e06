"""One browser for all tests of a module that open the page in one.

Not for all modules: playwright keeps an event loop running, and tests beside them have their own.
"""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

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
