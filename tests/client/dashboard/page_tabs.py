"""Tabs of a browser that show the page, of which nobody may complain."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.repository import ROOT

PAGE_TOOLS = ROOT / ".venv" / "page" / "node_modules"
"""What `make browser-test` has from npm."""


def expect(what: Any) -> Any:
    """Wait until something of a page is so; its content policy refuses to wait inside of it."""
    from playwright import sync_api

    sync_api.expect.set_options(timeout=PATIENCE_S * 1000)
    return sync_api.expect(what)


def tool(path: str) -> str:
    """The path of a tool from npm; the test is skipped where it is not."""
    found = PAGE_TOOLS / path
    if not found.exists():
        pytest.skip(f"{path.partition('/')[0]} is not here: make browser-test asks npm for it")
    return str(found)


@contextmanager
def tab(
    browser: Any, url: str, *, width: int = 1280, complains: bool = False, **options: Any
) -> Iterator[Any]:
    """An opened page that is live; `complains`: whether the console may say something."""
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 800}, **options)
    context.set_default_timeout(PATIENCE_S * 1000)
    page = context.new_page()
    page.on("console", lambda said: complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))

    def dismiss(dialog: Any) -> None:
        complaints.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", dismiss)
    try:
        page.goto(url)
        expect(page.locator("#banner")).to_have_text("live")
        yield page
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "too wide"
    finally:
        context.close()
    assert complains or complaints == []


def go(page: Any, place: str) -> None:
    """Show another page of the same address, such as "runs/ID"."""
    page.goto(page.url.partition("#")[0] + "#/" + place)


def found_by_axe(page: Any, *only: str) -> list[str]:
    """What axe complains of, with the elements that it complains of; `only`: by these rules."""
    chosen = {"resultTypes": ["violations"], **({"runOnly": list(only)} if only else {})}
    found = page.evaluate("chosen => axe.run(document, chosen)", chosen)
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:200] for node in each['nodes']]}"
        for each in found["violations"]
    ]
