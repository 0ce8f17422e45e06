"""The page in a real browser: what it shows is what the client says, and nothing of it is run."""

from collections.abc import Iterator
from typing import Any

import pytest

from stratagem.common.base.ids import RunId
from stratagem.coordinator.observe.run_logs import RunLogLine
from tests.client.dashboard.page_rig import PageRig, rig
from tests.client.dashboard.page_tabs import expect, go, tab

pytestmark = pytest.mark.browser

SCRIPT = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageRig]:
    with rig(tmp_path_factory.mktemp("page"), operates=True) as made:
        made.submit("waiting")
        made.submit("ended", model={"entrypoint": "m:f", "kwargs": {"text": SCRIPT}})
        made.client.get("ended").cancel()
        made.app.logs.add(RunId("ended"), RunLogLine(1.0, "w", "PRINT", f"\x1b[2J{SCRIPT}"))
        yield made


@pytest.fixture(params=WIDTHS)
def page(request: pytest.FixtureRequest, browser: Any, at: PageRig) -> Iterator[Any]:
    with tab(browser, at.url, width=request.param) as opened:
        yield opened


def test_the_token_leaves_the_address_and_runs_are_listed(page: Any, at: PageRig) -> None:
    assert "token" not in page.url
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="waiting").locator(".phase")).to_have_text("placing")
    page.locator("#filter").fill("ended")
    expect(rows).to_have_count(1)
    page.locator("#filter").fill("")
    at.submit("new")
    expect(rows).to_have_count(3)
    at.client.get("new").cancel()
    expect(rows.filter(has_text="new").locator(".phase")).to_have_text("cancelled")
    at.client.get("new").delete()
    expect(rows).to_have_count(2)


def test_a_run_shows_its_status_and_each_event_once(page: Any, at: PageRig) -> None:
    page.get_by_role("link", name="ended", exact=True).click()
    status = at.client.get("ended").status()
    expect(page.locator("h1")).to_have_text("ended")
    expect(page.locator(".head .why")).to_have_text(status.reason)
    events = page.locator(".events li")
    for _ in range(2):
        at.client.get("ended").resume()
        expect(page.locator(".head .phase")).to_have_text("placing · waiting")
        at.client.get("ended").cancel()
        expect(page.locator(".head .phase")).to_have_text("cancelled")
    newest = at.client.get("ended").status().event_index
    expect(events).to_have_count(newest + 1)
    shown = events.evaluate_all("all => all.map(each => each.value)")
    assert shown == list(range(newest, -1, -1))
    page.locator("#kinds").fill("RunSubmitted")
    page.locator("#kinds").press("Enter")
    expect(events).to_have_count(1)


def test_text_of_others_is_text(page: Any) -> None:
    go(page, "runs/ended")
    page.get_by_text("Job", exact=True).click()
    expect(page.locator("details pre").last).to_contain_text("onerror=alert(1)")
    page.get_by_text("Log", exact=True).click()
    expect(page.locator(".log")).to_contain_text("\\x1b")
    expect(page.locator(".log")).to_contain_text("<script>document.title")
    assert page.title() == "ended · Stratagem"
    assert page.locator("main script, main img").count() == 0


def test_the_keyboard_reaches_everything_that_acts(page: Any) -> None:
    names = []
    for _ in range(9):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.id || document.activeElement.innerText"))
    assert names[:4] == ["To the content", "Stratagem", "nav-runs", "nav-workers"]
    assert {"filter", "phase"} <= set(names)
    unnamed = "all => all.filter(each => !each.labels?.length && !each.innerText).length"
    assert page.locator("input, select, button").evaluate_all(unnamed) == 0


def test_a_browser_without_the_token_is_asked_for_it(browser: Any, at: PageRig) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(at.url.partition("#")[0])
    expect(page.locator("h1")).to_have_text("This page needs its token")
    page.locator("#token").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("this token is not the page's")
    page.locator("#token").fill(at.token)
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(2)
    context.close()
