"""The page in a real browser: what it shows is what the client says, and nothing of it is run."""

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from stratagem.client.course.views import Event, Progress
from stratagem.client.sdk.run import AsyncRun
from stratagem.common.base.ids import RunId
from stratagem.coordinator.observe.logs import RunLogLine
from tests.client.dashboard.page_rig import PageRig, rig
from tests.client.dashboard.page_shape import misplaced
from tests.client.dashboard.page_tabs import expect, go, tab

pytestmark = pytest.mark.browser

SCRIPT = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
WIDTHS = (1280, 390)
LONG = "w" * 10_000
ODD = "\x1b[2J\x07\u202e<b>odd</b>\u2066\u2028"


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


@pytest.mark.parametrize(
    ("zone", "now", "said"),
    [
        ("Pacific/Auckland", "2026-03-01T11:30:00Z", "00:29:59"),
        ("Pacific/Auckland", "2026-03-01T10:59:00Z", "2026-03-02 00:29:59"),
        ("America/New_York", "2026-03-02T05:00:01Z", "2026-03-01 06:29:59"),
        ("UTC", "2026-03-01T12:00:00Z", "11:29:59"),
    ],
)
def test_a_time_is_of_the_browsers_zone_and_has_its_day_where_that_is_not_today(
    browser: Any, at: PageRig, zone: str, now: str, said: str
) -> None:
    time_s = datetime(2026, 3, 1, 11, 29, 59, tzinfo=UTC).timestamp()
    with tab(browser, at.url, timezone_id=zone) as page:
        page.clock.set_fixed_time(now)
        script = "at => import('/static/format.js').then(all => all.clock(at))"
        assert page.evaluate(script, time_s) == said


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


def test_a_run_that_has_ended_shows_its_status_and_nothing_of_its_progress(
    page: Any, at: PageRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And who has stopped it with the keyboard stands on what stands in the button's place."""
    measured = Progress(399, 23_000, 0.5, 1.0, 0, 0, 0, 1, "", grad_norm=1.25, lr=0.125)
    watch = AsyncRun.watch

    async def measuring(run: AsyncRun, *which: Any, **how: Any) -> AsyncIterator[Event | Progress]:
        if how.get("follow") is not False:
            yield measured
        async for item in watch(run, *which, **how):
            yield item

    at.submit("stopped")
    run = at.client.get("stopped")
    numbers, counted = page.locator(".numbers dl"), page.locator(".numbers dl > div").first
    with monkeypatch.context() as training:
        training.setattr(AsyncRun, "watch", measuring)
        go(page, "runs/stopped")
        expect(counted).to_contain_text("399 of 23,000")
        expect(numbers).to_contain_text("gradient norm")
        page.evaluate("window.confirm = () => true")
        page.get_by_role("button", name="stop").focus()
        page.keyboard.press("Enter")
        expect(page.locator(".head .phase")).to_have_text("cancelled")
        expect(page.get_by_role("button", name="resume")).to_be_focused()

    status = run.status()
    for _ in ("who has looked at it", "who comes back"):
        expect(counted.locator("data")).to_have_attribute("value", str(status.step))
        expect(numbers).not_to_contain_text("gradient norm")
        expect(numbers).not_to_contain_text("learning rate")
        go(page, "workers")
        expect(page.locator("h1")).to_have_text("Workers")
        go(page, "runs/stopped")
        expect(page.locator(".head .phase")).to_have_text("cancelled")
        expect(page.locator(".events li")).to_have_count(status.event_index + 1)
    go(page, "")
    expect(page.locator("tbody tr")).to_have_count(3)
    page.goto("about:blank")  # or it may still ask for the run, and complain that it is gone
    run.delete()


def test_text_of_others_is_text(page: Any) -> None:
    go(page, "runs/ended")
    page.get_by_text("Job", exact=True).click()
    expect(page.locator("details pre").last).to_contain_text("onerror=alert(1)")
    page.get_by_text("Log", exact=True).click()
    expect(page.locator(".log")).to_contain_text("\\x1b")
    expect(page.locator(".log")).to_contain_text("<script>document.title")
    assert page.title() == "ended · Stratagem"
    assert page.locator("main script, main img").count() == 0


def test_long_and_odd_names_break_nothing(page: Any, at: PageRig) -> None:
    run_id, worker = "r" * 64, "W" * 64
    at.submit(run_id, model={"entrypoint": "m:f", "kwargs": {LONG: ODD}}, name="n" * 64)
    run = at.client.get(run_id)
    for text in (LONG, ODD, f"{ODD} {LONG}"):
        at.app.logs.add(RunId(run_id), RunLogLine(1.0, worker, "PRINT", text))
    run.cancel()
    page.get_by_role("link", name=run_id).click()
    expect(page.locator(".head .phase")).to_contain_text("cancelled")
    expect(page.locator("figure svg").first).to_be_visible()
    for name in ("Job", "Log"):
        page.get_by_text(name, exact=True).click()
    expect(page.locator(".log")).to_contain_text(LONG[:1000])
    expect(page.locator(".log")).to_contain_text("\\x1b[2J\\x07\\x202e")
    assert misplaced(page) == []
    go(page, "")
    expect(page.locator("tbody tr").filter(has_text=run_id)).to_be_visible()
    assert misplaced(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    text = page.locator("body").inner_text()
    assert not [char for char in ODD if char in text and not char.isprintable()]
    page.goto("about:blank")  # what the page still asks of the run must not find it gone
    run.delete()


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
