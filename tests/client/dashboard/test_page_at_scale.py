"""The page of very much, in a real browser: a run of 100,000 facts, 1,001 runs and 1,000 workers.

It shows all numbers, and holds few of them at a time.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from stratagem.client.course.views import Event
from stratagem.client.sdk.blocking import Client
from tests.client.dashboard.page_rig import page_of
from tests.client.dashboard.page_tabs import expect, go, tab
from tests.crash.rig import until
from tests.repository import ROOT

pytestmark = pytest.mark.browser

NUM_FACTS, NUM_CANCELLED, NUM_WORKERS = 100_000, 1000, 1000
HOSTS = str(ROOT / "benchmarks" / "simulated_hosts.py")
WINDOW = 100
"""Rows of a list that are in the page at a time."""
MAX_ELEMENTS = 6000
MAX_PANELS_KB = 600
"""Of all pictures of a run with the tables of their numbers, in one answer."""
MAX_DRAWINGS = 25
CELLS = "all => all.map(row => [...row.cells].map(cell => cell.textContent))"


@dataclass
class AtScale:
    client: Client
    url: str
    address: str
    """Of the coordinator."""


@dataclass
class Answers:
    """What a tab has been answered, by path; of pictures how many events they are of."""

    asked: dict[str, int] = field(default_factory=dict)
    panels: list[Any] = field(default_factory=list)

    def note(self, response: Any) -> None:
        path = response.url.partition("/api/")[2].partition("?")[0]
        self.asked[path] = self.asked.get(path, 0) + 1
        if path == "panels":
            self.panels.append(response)


@contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone at the end of the block."""
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as made:
        try:
            yield made
        finally:
            made.kill()


def is_whole(response: Any) -> bool:
    """Return whether these are the pictures of all events of a run."""
    if "/api/panels" not in response.url:
        return False
    told = response.json()
    return bool(told["num_read"] == told["num_events"])


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtScale]:
    from benchmarks.long_journal import fill  # it imports a coordinator

    folder = tmp_path_factory.mktemp("scale")
    fill(folder / "data" / "journal.sqlite", NUM_FACTS, ["segments"], NUM_CANCELLED)
    ready, flags = folder / "ready", ["--listen", "127.0.0.1:0", "--data-dir", str(folder / "data")]
    with program("-m", "stratagem.coordinator", *flags, "--ready-file", str(ready)):
        until(ready.exists, "the coordinator serves")
        address = json.loads(ready.read_text())["address"]
        with Client(address) as client, page_of(address) as (_, url):
            yield AtScale(client, url, address)


def num_elements(page: Any) -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


def numbers_of(page: Any, figure: str) -> list[list[str]]:
    """The table of a picture."""
    shown = page.locator(f'figure[data-name="{figure}"]')
    shown.get_by_text("The same as numbers").click()
    rows = shown.locator("tbody tr")
    expect(rows.first).to_be_visible()
    found: list[list[str]] = rows.evaluate_all(CELLS)
    shown.get_by_text("The same as numbers").click()
    return found


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_a_run_of_100_000_facts_is_shown_in_part_and_then_whole(browser: Any, at: AtScale) -> None:
    run, answers = at.client.get("segments"), Answers()
    newest = run.status().event_index
    assert NUM_FACTS - 2 <= newest + 1 <= NUM_FACTS
    with tab(browser, at.url) as page:
        page.on("response", answers.note)
        with page.expect_response(is_whole):
            go(page, "runs/segments")
            expect(page.locator("figure svg").first).to_be_visible()
        expect(page.locator("figure svg")).to_have_count(6)
        expect(page.locator(".page > p[role=status]")).to_have_text("")
        assert_bounded(page, answers)

        (finished,) = run.watch(kinds=["SegmentFinished"], newest_first=True, limit=1)
        assert isinstance(finished, Event)
        step, metrics = finished.payload["step"], finished.payload["metrics"]
        for figure, name in (("Loss", "test.loss"), ("train.grad_norm", "train.grad_norm")):
            row = [row for row in numbers_of(page, figure) if row[0] == name][-1]
            assert number(row[1]) == step
            assert number(row[2]) == pytest.approx(metrics[name], rel=1e-3)
        assert_bounded(page, answers)

        events = page.locator(".events li")
        expect(events).to_have_count(WINDOW)
        page.get_by_role("button", name="Older events").click()
        expect(events).to_have_count(2 * WINDOW)
        shown = events.evaluate_all("all => all.map(each => each.value)")
        assert shown == list(range(newest, newest - 2 * WINDOW, -1))
        expect(events.first).to_contain_text("its workers are free again")


def assert_bounded(page: Any, answers: Answers) -> None:
    read = [each.json()["num_read"] for each in answers.panels]
    assert read == sorted(read)
    assert len(read) <= MAX_DRAWINGS, "it is drawn less often than it is read"
    assert answers.asked["events"] == 1
    assert max(len(each.body()) for each in answers.panels) < 1000 * MAX_PANELS_KB
    assert num_elements(page) < MAX_ELEMENTS


def test_of_1001_runs_and_1000_workers_a_window_is_in_the_page(browser: Any, at: AtScale) -> None:
    rows = "tbody tr"
    with (
        program(HOSTS, at.address, "--workers", str(NUM_WORKERS)) as workers,
        tab(browser, at.url) as page,
    ):
        expect(page.locator(".tools [role=status]")).to_have_text("1001 of 1001")
        expect(page.locator(rows)).to_have_count(WINDOW)
        assert num_elements(page) < MAX_ELEMENTS
        page.locator("#filter").fill("cancelled-0999")
        expect(page.locator(rows)).to_have_count(1)
        page.locator("#filter").fill("")
        page.get_by_role("button", name="Show more").click()
        expect(page.locator(rows)).to_have_count(2 * WINDOW)
        shown = page.locator(f"{rows} th a").all_inner_texts()
        assert shown == [run.run_id for run in at.client.runs()][: 2 * WINDOW]

        assert workers.stdout is not None
        assert workers.stdout.readline(), "all are registered"
        go(page, "workers")
        expect(page.locator(".grid .dot[data-state=idle]")).to_have_count(NUM_WORKERS)
        expect(page.locator(".tools [role=status]")).to_have_text(
            f"{NUM_WORKERS} of {NUM_WORKERS} alive"
        )
        expect(page.locator(rows)).to_have_count(WINDOW)
        shown = page.locator(f"{rows} th").all_inner_texts()
        assert shown == [each.worker_id for each in at.client.workers()][:WINDOW]
        page.locator("#filter").fill("0999")
        expect(page.locator(rows)).to_have_count(1)
        assert num_elements(page) < MAX_ELEMENTS
