"""The site in a real browser without a network: read from its folder, with its search."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S

pytestmark = pytest.mark.browser

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
PAGES = (
    "index.html",
    "explanation/architecture.html",
    "how-to/watching.html",
    "how-to/dashboard.html",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser is here: none of {', '.join(NAMES)}")
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        opened = started.chromium.launch(executable_path=found, args=arguments)
        yield opened
        opened.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_site_is_read_and_searched_as_files(browser: Any, site: Path, width: int) -> None:
    asked: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 800})
    context.set_default_timeout(PATIENCE_S * 1000)
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    for name in PAGES:
        page.goto((site / name).as_uri())
        room = page.evaluate("document.documentElement.scrollWidth")
        assert room <= width, f"{name} is wider than the screen"
        missing = "[...document.images].filter(each => !each.naturalWidth).map(each => each.src)"
        assert page.evaluate(missing) == []
    page.keyboard.press("/")
    page.keyboard.type("fencing")
    found = page.get_by_role("option", name="Party, membership and fencing")
    playwright.expect(found.first).to_be_visible(timeout=PATIENCE_S * 1000)
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    context.close()
