"""What the page does by itself: its banner in every state, and runs beside each other."""

from collections.abc import Iterator
from typing import Any

import pytest

from stratagem.client.dashboard.server import PageOptions, PageServer
from stratagem.client.report.comparison import job_differences
from stratagem.common.base.errors import StandbyError, UnauthenticatedError, WrongStateError
from stratagem.common.rpc import server as rpc_server
from tests.client.dashboard.page_rig import PageRig, rig
from tests.client.dashboard.page_tabs import expect, go, tab
from tests.free_ports import free_port

pytestmark = pytest.mark.browser

WRONG = "The token in the address is not the one that the page was started with."
CELLS = "all => all.map(row => [...row.cells].map(cell => cell.textContent))"
REFUSALS = (
    (
        StandbyError("this one stands by: b leads", "b:1"),
        "standby",
        "another coordinator leads for",
    ),
    (UnauthenticatedError("this token is not known"), "denied", "not allowed"),
    (WrongStateError("protocol version: '2'"), "version", "coordinator has another version for"),
)


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageRig]:
    with rig(tmp_path_factory.mktemp("page"), operates=True) as made:
        made.submit("waiting")
        made.submit("ended", model={"entrypoint": "m:f", "kwargs": {"text": "<b>"}})
        made.client.get("ended").cancel()
        yield made


def test_the_banner_says_why_the_coordinator_does_not_answer_and_nothing_acts_on_it(
    browser: Any, at: PageRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    banner = "#banner"
    with tab(browser, at.url, complains=True) as page:
        go(page, "runs/ended")
        buttons = page.locator(".head .buttons button")
        for error, state, words in REFUSALS:
            expect(page.locator("figure svg").first).to_be_visible()
            expect(buttons.first).to_be_enabled()
            with monkeypatch.context() as refusing:
                refusing.setattr(rpc_server, "_check_version", refused(error))
                expect(page.locator(banner)).to_have_attribute("data-state", state)
                expect(page.locator(banner)).to_contain_text(words)
                expect(page.locator("#cause")).to_contain_text(str(error))
                assert buttons.count() == 2
                expect(page.locator(".head .buttons button:enabled")).to_have_count(0)
                assert page.locator("figure svg").first.is_visible(), "the last picture stays"
                if state == "denied":
                    go(page, "runs/waiting")
                    expect(page.get_by_role("alert")).to_contain_text(str(error))
            expect(page.locator(banner)).to_have_text("live")
            expect(page.locator("#cause")).to_be_empty()
            name = "waiting" if state == "denied" else "ended"  # asked for again by itself
            expect(page.locator("h1")).to_have_text(name)
            go(page, "runs/ended")


def refused(error: Exception) -> Any:
    def refuse(_call: Any) -> None:
        raise error

    return refuse


def test_a_page_that_was_started_anew_is_reconnected_to_and_asks_for_its_token(
    browser: Any, at: PageRig
) -> None:
    options = PageOptions(f"127.0.0.1:{free_port()}")
    first = PageServer(options, at.client.address)
    with first.beside():
        context = browser.new_context()
        page = context.new_page()
        page.goto(first.url)
        expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.locator("#banner")).to_contain_text("reconnecting to the page’s server for")
    expect(page.locator("tbody tr")).to_have_count(2)
    second = PageServer(options, at.client.address)
    with second.beside():
        expect(page.locator("#banner")).to_have_text("not allowed")
        expect(page.locator("h1")).to_have_text("This page needs its token")
        expect(page.locator(".door")).to_contain_text("This browser has not shown the token")
        page.goto(first.url)  # changes the fragment, loads nothing
        expect(page.locator(".door")).to_contain_text(WRONG)
        assert "token" not in page.url
        page.goto(second.url)
        expect(page.locator("#banner")).to_have_text("live")
        expect(page.locator("tbody tr")).to_have_count(2)
        context.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_runs_are_marked_and_compared_with_the_keyboard(
    browser: Any, at: PageRig, width: int
) -> None:
    jobs = [at.client.get(each).status().job for each in ("waiting", "ended")]
    wanted = [each.key for each in job_differences(jobs)]
    with tab(browser, at.url, width=width) as page:
        for name in ("waiting", "ended"):
            page.get_by_role("checkbox", name=f"compare {name}").focus()
            page.keyboard.press("Space")
        expect(page.locator(".marks")).to_contain_text("2 runs marked")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("Comparison")
        assert page.url.endswith("#/compare/waiting,ended")
        expect(page.locator("tbody").first.locator("tr")).to_have_count(2)
        rows = page.get_by_role("region", name="In what their jobs differ").locator("tbody tr")
        expect(rows).to_have_count(len(wanted))
        assert [row[0] for row in rows.evaluate_all(CELLS)] == wanted
        text = next(row for row in rows.evaluate_all(CELLS) if row[0] == "model.kwargs.text")
        assert text[1:] == ["not set", "<b>"]
        page.go_back()
        expect(page.get_by_role("checkbox", name="compare ended")).to_be_checked()
        page.get_by_role("button", name="clear").click()
        expect(page.locator(".marks")).to_be_hidden()
