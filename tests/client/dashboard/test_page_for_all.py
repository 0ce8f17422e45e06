"""The page for those who do not see it, do not point at it, or have asked it to be still."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.report import run_panels
from tests.client.dashboard.page_rig import PageRig, rig
from tests.client.dashboard.page_tabs import expect, found_by_axe, go, tab, tool

pytestmark = pytest.mark.browser

FOCUSED = """() => {
  const at = document.activeElement, style = getComputedStyle(at);
  const box = at.getBoundingClientRect();
  const shown = at.matches(':focus-visible') && parseFloat(style.outlineWidth) > 0;
  return {what: at.id || at.getAttribute('aria-label') || at.innerText || at.tagName, shown,
          top: box.top + scrollY, left: box.left, visible: box.width > 0 && box.height > 0};
}"""
UNNAMED = """all => all.filter(each => !each.labels?.length && !each.innerText.trim()
  && !each.getAttribute('aria-label')).map(each => each.outerHTML)"""
HEARD = """() => {
  const heard = [], banner = document.querySelector("#banner");
  const observer = new MutationObserver(() => heard.push(banner.textContent));
  observer.observe(banner, {childList: true, characterData: true, subtree: true});
  return heard;
}"""
CONTROLS = "main :is(a[href], button, input, select, summary, [tabindex='0'])"


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageRig]:
    """A page that operates, of a run that waits and one that has ended."""
    with rig(tmp_path_factory.mktemp("page"), operates=True) as made:
        made.submit("waiting")
        made.submit("ended")
        made.client.get("ended").cancel()
        yield made


def opened(page: Any, place: str) -> None:
    """Show a page with all that it can unfold."""
    go(page, place)
    expect(page.locator("h1")).to_be_visible()
    if place.startswith("runs/"):
        expect(page.locator("figure svg").first).to_be_visible()
        page.locator("summary:visible").evaluate_all("all => all.forEach(each => each.click())")


@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(browser: Any, at: PageRig, width: int) -> None:
    source = Path(tool("axe-core/axe.min.js")).read_text()
    with tab(browser, at.url, width=width) as page:
        page.evaluate(source)  # a script element is against the page's content policy
        for place in ("", "runs/waiting", "workers"):
            opened(page, place)
            found = found_by_axe(page)
            page.emulate_media(color_scheme="dark")
            assert found + found_by_axe(page, "color-contrast") == [], place
            page.emulate_media(color_scheme="light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_at_the_door(browser: Any, at: PageRig, scheme: Any) -> None:
    source = Path(tool("axe-core/axe.min.js")).read_text()
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(at.url.partition("#")[0])
    expect(page.locator("h1")).to_have_text("This page needs its token")
    page.evaluate(source)
    assert found_by_axe(page) == []
    context.close()


@pytest.mark.parametrize("place", ["", "runs/ended", "workers"])
def test_the_keyboard_reaches_every_control_in_the_order_of_the_page(
    browser: Any, at: PageRig, place: str
) -> None:
    with tab(browser, at.url) as page:
        opened(page, place)
        assert page.locator(CONTROLS).evaluate_all(UNNAMED) == []
        wanted = page.locator(f"{CONTROLS}:visible").count()
        page.locator("#main").focus()
        seen = []
        for _ in range(wanted):
            page.keyboard.press("Tab")
            seen.append(page.evaluate(FOCUSED))
        assert [each for each in seen if not (each["shown"] and each["visible"])] == []
        assert len({(each["top"], each["left"]) for each in seen}) == wanted
        tops = [each["top"] for each in seen]
        assert all(after >= before - 24 for before, after in pairwise(tops))


def test_a_run_is_found_read_and_stopped_with_the_keyboard_alone(browser: Any, at: PageRig) -> None:
    at.submit("typed")
    page = browser.new_context().new_page()
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(at.url)
    expect(page.locator("#banner")).to_have_text("live")
    expect(page.get_by_role("link", name="typed", exact=True)).to_be_visible()
    heard = page.evaluate_handle(HEARD)
    tab_to(page, "typed")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("typed")
    for wanted in ("stop", "Log"):
        tab_to(page, wanted)
        page.keyboard.press("Enter")
    expect(page.locator(".head .phase")).to_contain_text("cancelled")
    expect(page.locator(".log")).to_be_visible()
    assert heard.json_value() == [], "the banner has nothing new to tell"
    page.context.close()
    at.client.get("typed").delete()


def tab_to(page: Any, name: str) -> None:
    """Press Tab until what has this name has the focus."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(FOCUSED)["what"].strip() == name:
            return
    raise AssertionError(f"Tab does not reach {name!r}")


def test_pictures_say_what_they_show_and_have_their_numbers_beside_them(
    browser: Any, at: PageRig
) -> None:
    shown = at.client.get("ended").shown()
    line = run_panels.time_line_panel(shown).draw(720)
    with tab(browser, at.url) as page:
        opened(page, "runs/ended")
        figure = page.locator("figure").filter(has_text="Time line")
        assert figure.locator("svg[role=img] > title").count() == 1
        assert figure.locator("svg[role=img] > desc").count() == 1
        headings = figure.locator("thead th").all_inner_texts()
        assert headings == list(line.table.headings)
        cells = "all => all.map(row => [...row.cells].map(cell => cell.textContent))"
        assert figure.locator("tbody tr").evaluate_all(cells) == [
            list(row) for row in line.table.rows
        ]


def test_nothing_moves_for_those_who_have_asked_for_that(browser: Any, at: PageRig) -> None:
    moving = """() => [...document.querySelectorAll('*')].filter(each => {
      const style = getComputedStyle(each);
      return parseFloat(style.transitionDuration) || style.animationName !== 'none';
    }).length"""
    with tab(browser, at.url, reduced_motion="reduce") as page:
        for place in ("", "runs/ended", "workers"):
            opened(page, place)
            assert page.evaluate(moving) == 0
