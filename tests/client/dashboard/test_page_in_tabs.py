"""The page in tabs that are hidden, many, of a reader or an operator, and over TLS."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem.client.sdk.blocking import RunHandle
from stratagem.common.identity.certificates import make_authority
from stratagem.common.identity.tls import Role
from tests.client.dashboard.page_rig import PageRig, page_of, rig
from tests.client.dashboard.page_tabs import expect, go, tab

pytestmark = pytest.mark.browser

HIDE = """is => {
  Object.defineProperty(document, 'hidden', {configurable: true, get: () => is});
  document.dispatchEvent(new Event('visibilitychange'));
}"""
POST = "path => fetch(path, {method: 'POST'}).then(answer => answer.status)"
MANY = 8
"""More tabs than a browser keeps connections to one server."""


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageRig]:
    """A page that only shows."""
    with rig(tmp_path_factory.mktemp("page")) as made:
        made.submit("r-1")
        yield made


@pytest.fixture
def run(at: PageRig) -> Iterator[RunHandle]:
    """The run of the page, which waits for a worker again after each test, passed or failed."""
    found = at.client.get("r-1")
    yield found
    if found.status().phase == "CANCELLED":
        found.resume()


def test_a_hidden_tab_asks_for_nothing_and_goes_on_where_it_was(
    browser: Any, at: PageRig, run: RunHandle
) -> None:
    """A browser without windows hides none: the page is told that it is hidden."""
    with tab(browser, at.url) as page:
        go(page, "runs/r-1")
        expect(page.locator(".events li")).to_have_count(run.status().event_index + 1)
        with page.expect_event("requestfailed", lambda each: "/api/stream" in each.url):
            page.evaluate(HIDE, True)
        seen = run.status().event_index
        asked: list[str] = []
        page.on("request", lambda each: asked.append(each.url))
        run.cancel()
        with tab(browser, at.url) as other:
            go(other, "runs/r-1")
            expect(other.locator(".head .phase")).to_have_text("cancelled")
        assert asked == []
        expect(page.locator(".events li")).to_have_count(seen + 1)
        page.evaluate(HIDE, False)
        expect(page.locator(".head .phase")).to_have_text("cancelled")
        newest = run.status().event_index
        expect(page.locator(".events li")).to_have_count(newest + 1)
        values = page.locator(".events li").evaluate_all("all => all.map(each => each.value)")
        assert values == list(range(newest, -1, -1))
        (stream,) = [url for url in asked if "/api/stream" in url]
        assert stream.endswith(f"from={seen + 1}")


def test_more_tabs_than_connections_all_show_what_happens(
    browser: Any, at: PageRig, run: RunHandle
) -> None:
    with tab(browser, at.url) as first:
        go(first, "runs/r-1")
        tabs = [first, *(first.context.new_page() for _ in range(MANY - 1))]
        for each in tabs[1:]:
            each.goto(first.url)
        for each in tabs:
            expect(each.locator("#banner")).to_have_text("live")
            expect(each.locator(".head .phase")).to_have_text("placing · waiting")
        run.cancel()
        newest = run.status().event_index
        for each in tabs:
            expect(each.locator(".head .phase")).to_have_text("cancelled")
            expect(each.locator(".events li")).to_have_count(newest + 1)
            expect(each.locator("#banner")).to_have_text("live")


def test_a_reader_has_no_buttons_and_is_refused(browser: Any, at: PageRig) -> None:
    with tab(browser, at.url, complains=True) as page:
        go(page, "runs/r-1")
        expect(page.locator(".head .phase")).to_have_text("placing · waiting")
        assert page.locator(".head button").count() == 0
        for action in ("stop", "resume", "delete"):
            assert page.evaluate(POST, f"/api/runs/r-1/{action}") == 403
        assert at.client.get("r-1").status().phase == "PLACING"


def test_an_operator_stops_resumes_and_deletes_after_being_asked(
    browser: Any, tmp_path: Path
) -> None:
    with rig(tmp_path, operates=True) as at:
        at.submit("r-2")
        run = at.client.get("r-2")
        context = browser.new_context()
        page = context.new_page()
        asked: list[str] = []
        answers = [False, True, True, True, True]

        def answer(dialog: Any) -> None:
            asked.append(dialog.message)
            if answers.pop(0):
                dialog.accept()
            else:
                dialog.dismiss()

        page.on("dialog", answer)
        page.goto(at.url)
        expect(page.locator("#banner")).to_have_text("live")
        go(page, "runs/r-2")
        phase = page.locator(".head .phase")
        page.get_by_role("button", name="stop").click()
        assert run.status().phase == "PLACING"
        page.get_by_role("button", name="stop").click()
        expect(phase).to_have_text("cancelled")
        assert run.status().phase == "CANCELLED"
        page.get_by_role("button", name="resume").click()
        expect(phase).to_have_text("placing · waiting")
        page.get_by_role("button", name="stop").click()
        expect(phase).to_have_text("cancelled")
        page.get_by_role("button", name="delete").click()
        expect(page.locator("h1")).to_have_text("Runs")
        expect(page.locator("tbody tr")).to_have_count(0)
        assert list(at.client.runs()) == []
        assert [each.split()[0] for each in asked] == ["Stop", "Stop", "Go", "Stop", "Delete"]
        context.close()


def test_a_page_over_tls_is_live(browser: Any, at: PageRig, tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "certs")
    authority.issue(Role.COORDINATOR, "page", ["127.0.0.1"])
    token = tmp_path / "token"
    token.write_text("a-token-of-the-users-own")
    files = {
        "tls_cert": next((tmp_path / "certs").rglob("page*.crt")),
        "tls_key": next((tmp_path / "certs").rglob("page*.key")),
    }
    with page_of(at.client.address, token_file=token, **files) as (_, url):
        assert url.startswith("https://")
        context = browser.new_context(ignore_https_errors=True)
        page = context.new_page()
        page.goto(url)
        page.locator("#token").fill(token.read_text())
        page.keyboard.press("Enter")
        expect(page.locator("#banner")).to_have_text("live")
        expect(page.locator("tbody tr")).to_have_count(1)
        (cookie,) = context.cookies()
        assert (cookie["secure"], cookie["httpOnly"], cookie["sameSite"]) == (True, True, "Strict")
        context.close()
