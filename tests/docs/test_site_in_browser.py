"""The site in a real browser without a network: read from its folder, with its search."""

from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S

pytestmark = pytest.mark.browser

PAGES = (
    "index.html",
    "explanation/architecture.html",
    "how-to/watching.html",
    "how-to/dashboard.html",
)


def test_the_site_is_read_and_searched_as_files(browser: Any, site: Path) -> None:
    """On a wide screen and on a narrow one."""
    asked: list[str] = []
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_S * 1000)
    page = context.new_page()
    page.on("request", lambda request: asked.append(request.url))
    for name in PAGES:
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 800})
            page.goto((site / name).as_uri())
            room = page.evaluate("document.documentElement.scrollWidth")
            assert room <= width, f"{name} is wider than the screen"
        missing = "[...document.images].filter(each => !each.naturalWidth).map(each => each.src)"
        assert page.evaluate(missing) == []
    page.keyboard.press("/")
    page.keyboard.type("fencing")
    found = page.get_by_role("option", name="Party, membership and fencing")
    found.first.wait_for()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    context.close()
