"""The site has every page, and asks nobody but its own folder for anything."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.build_site import DOCS, Section, navigation

ELSEWHERE = re.compile(r"^(?:[a-z][a-z+.-]*:)?//", re.IGNORECASE)
IN_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")
LOADED_BY_SCRIPT = {
    "/mermaid": "mermaid",
    "/glightbox": "glightbox",
    "/pyodide": "pyodide",
    "/ace-builds": "ace",
}
"""What the theme's script fetches from elsewhere once a page has an element of this class."""


class Asked(HTMLParser):
    """What a page loads as it is shown: links that a reader may follow are none of it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.from_elsewhere: list[str] = []
        self.classes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attrs}
        self.classes |= set(told.get("class", "").split())
        loads = ["src", "srcset", "poster", "data", "action"]
        loads += ["href"] if tag in ("link", "use", "image", "base") else []
        found = [told[name] for name in loads if ELSEWHERE.match(told.get(name, ""))]
        self.from_elsewhere += found + IN_STYLE.findall(told.get("style", ""))


@pytest.mark.sweep
def test_the_site_has_every_page_once(site: Path) -> None:
    named = [path for part in navigation() for path in paths_of(part)]
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
    for path in named:
        built = path.replace("README.md", "index.md").replace(".md", ".html")
        assert (site / built).exists(), path


@pytest.mark.sweep
def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    pages = {path: Asked(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 50
    for path, asked in pages.items():
        assert not asked.from_elsewhere, path
        assert not asked.classes & {*LOADED_BY_SCRIPT.values()}, path
        assert not IN_STYLE.findall(path.read_text()), path
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        assert not IN_STYLE.findall(path.read_text()), path


@pytest.mark.sweep
def test_what_the_theme_could_fetch_is_known(site: Path) -> None:
    """A new version that fetches more is to be looked at."""
    (script,) = site.glob("assets/javascripts/bundle.*.js")
    fetched = set(
        re.findall(r"https://[\w.]*(?:unpkg|jsdelivr)[\w.]*/[\w./@-]+", script.read_text())
    )
    known = ("resize-observer-polyfill", *LOADED_BY_SCRIPT)
    assert fetched
    assert all(any(name in address for name in known) for address in fetched), fetched


@pytest.mark.parametrize(
    ("page", "is_found"),
    [
        ('<script src="https://unpkg.com/mermaid"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/css">', True),
        ('<p style="background: url(https://elsewhere.example/a.png)">', True),
        ('<a href="https://elsewhere.example">', False),
        ('<img src="images/loss.svg">', False),
    ],
)
def test_what_is_loaded_is_told_from_what_may_be_followed(page: str, is_found: bool) -> None:
    assert bool(Asked(page).from_elsewhere) is is_found


def paths_of(part: str | Section) -> list[str]:
    if isinstance(part, str):
        return [part]
    (pages,) = part.values()
    return [path for each in pages for path in ([each] if isinstance(each, str) else each.values())]
