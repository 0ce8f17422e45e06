"""The page in a real browser: what it shows is what the client says, and nothing of it is run."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from stratagem.common.base.ids import RunId
from stratagem.coordinator.observe.run_logs import RunLogLine
from tests.client.dashboard.page_rig import PageRig, rig
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.browser

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
SCRIPT = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
WIDTHS = (1280, 390)


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
    """An opened page, of which nobody may complain."""
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": request.param, "height": 800})
    context.set_default_timeout(PATIENCE_S * 1000)
    opened = context.new_page()
    opened.on("console", lambda said: complaints.append(said.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))

    def dismiss(dialog: Any) -> None:
        complaints.append(dialog.message)
        dialog.dismiss()

    opened.on("dialog", dismiss)
    opened.goto(at.url)
    expect(opened.locator("#banner")).to_have_text("live")
    yield opened
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth"), "too wide"
    context.close()
    assert complaints == []


def expect(what: Any) -> Any:
    playwright.expect.set_options(timeout=PATIENCE_S * 1000)
    return playwright.expect(what)


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
    page.goto(page.url.partition("#")[0] + "#/runs/ended")
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
