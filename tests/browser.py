"""The browser of all tests that open pages in one: a fixture for the conftest of their folder."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Literal

import pytest

NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
_opened: list[Any] = []
"""The one that is open: two folders may have asked for it."""


def _scope(fixture_name: str, config: pytest.Config) -> Literal["session", "module"]:
    """Playwright keeps an event loop running, and tests beside those of a browser have their own:
    where there are such tests, each module has a browser of its own."""
    return "session" if config.getoption("markexpr") == "browser" else "module"


@pytest.fixture(scope=_scope)
def browser() -> Iterator[Any]:
    if _opened:
        yield _opened[0]
        return
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is here: none of {', '.join(NAMES)}")
    with ExitStack() as stack:
        started = stack.enter_context(playwright.sync_playwright())
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--js-flags=--expose-gc"]
        made = started.chromium.launch(executable_path=found, args=arguments)
        stack.callback(made.close)
        _opened.append(made)
        stack.callback(_opened.clear)
        yield made
