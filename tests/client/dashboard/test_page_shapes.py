"""The shape of every page, kept in `shapes`: whatever disappears, is added, overlaps or reaches out
fails. What is meant is written anew by `WRITE_SHAPES=1 make browser-test`; look at the difference.
"""

import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.errors import UserCodeError
from tests.client.dashboard.page_cluster import PageCluster, jobs
from tests.client.dashboard.page_shape import misplaced, shape_of
from tests.client.dashboard.page_tabs import expect, found_by_axe, go, tab, tool
from tests.jobs import job, user_model
from tests.repository import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.cluster]

FOLDER = Path(__file__).with_name("shapes")
JOBS = tuple(jobs())
FAILED = "failed"
COMPARED = "compare/allreduce,local"
PLACES = ("", "workers", COMPARED, *(f"runs/{name}" for name in (*JOBS, FAILED)))
UNFOLDED = ("runs/population", f"runs/{FAILED}")
WITH_AXE = ("", "workers", COMPARED, "runs/allreduce", "runs/population", f"runs/{FAILED}")
NARROW = {"width": 390, "height": 800}
WIDE = {"width": 1280, "height": 800}


@pytest.fixture(scope="module")
def at(trained: PageCluster) -> PageCluster:
    """All runs have ended, one of them by an error of its code."""
    spec = job(user_model("acting_models:refused", text="no such layer"))
    with pytest.raises(UserCodeError):
        trained.client.submit(spec, FAILED).result()
    for name in JOBS:
        trained.client.get(name).result()
    return trained


@pytest.fixture(scope="module")
def page(browser: Any, at: PageCluster) -> Iterator[Any]:
    with tab(browser, at.url) as opened:
        yield opened


def shown(page: Any, place: str) -> None:
    """Show a page until nothing more of it is to come."""
    page.set_viewport_size(WIDE)
    go(page, place)
    if place == "":
        expect(page.get_by_role("link", name="allreduce", exact=True)).to_be_visible()
    elif place == "workers":
        expect(page.get_by_role("row", name="worker-3")).to_be_visible()
        expect(page.locator("p.quiet[role=status]")).to_have_text("4 of 4 alive")
    elif place == f"runs/{FAILED}":
        expect(page.locator("h1")).to_have_text(FAILED)
        expect(page.locator("figure[data-name='Time line'] svg")).to_be_visible()
    else:
        expect(page.locator("figure svg").first).to_be_visible()
        if place.startswith("compare/"):  # its tables are filled by answers of their own
            for run in place.removeprefix("compare/").split(","):
                expect(page.get_by_role("rowheader", name=run, exact=True)).to_be_visible()
            expect(page.locator("tbody th code").first).to_be_visible()
    expect(page.locator("figure:not(:has(svg))")).to_have_count(0)


@pytest.mark.parametrize("place", PLACES)
def test_a_page_has_its_shape_and_everything_its_place(
    page: Any, at: PageCluster, place: str
) -> None:
    shown(page, place)
    path = FOLDER / f"{place.partition(',')[0].replace('/', '-') or 'runs'}.yaml"
    worker = at.client.workers()[0]
    words = {str(ROOT): "ROOT", worker.device_name or worker.device: "DEVICE"}
    shape = shape_of(page, frozenset((*JOBS, FAILED)), words)
    if os.environ.get("WRITE_SHAPES"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shape)
    assert shape == path.read_text()
    assert misplaced(page) == []
    page.set_viewport_size(NARROW)
    if place.startswith("runs/"):
        expect(page.locator("figure svg").first).to_be_visible()
    assert misplaced(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_list_has_the_same_shape_the_day_after(browser: Any, at: PageCluster) -> None:
    with tab(browser, at.url) as page:
        page.clock.set_system_time(datetime.now(UTC) + timedelta(days=1))
        page.reload()
        shown(page, "")
        expect(page.locator("td[data-name=Begun]").first).to_have_text(
            re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
        )
        shape = shape_of(page, frozenset((*JOBS, FAILED)), {})
    assert shape == (FOLDER / "runs.yaml").read_text()


@pytest.mark.parametrize(
    "spoil",
    [
        "document.querySelector('.head').style.marginBottom = '-60px'",
        "document.querySelector('.pictures').style.width = '3000px'",
        "document.querySelector('.numbers').style.height = '10px'",
        "document.querySelector('main .page').append(document.querySelector('.head'))",
        "document.querySelector('.numbers').style.display = 'none'",
    ],
)
def test_a_spoiled_page_is_noticed(page: Any, spoil: str) -> None:
    shown(page, "workers")
    shown(page, "runs/local")
    before = shape_of(page, frozenset(), {})
    assert misplaced(page) == []
    page.evaluate(spoil)
    assert misplaced(page) or shape_of(page, frozenset(), {}) != before


def test_axe_finds_nothing_on_pages_of_real_runs(page: Any) -> None:
    source = Path(tool("axe-core/axe.min.js")).read_text()
    for place in WITH_AXE:
        shown(page, place)
        page.evaluate(source)
        if place in UNFOLDED:
            page.locator("summary:visible").evaluate_all("all => all.forEach(one => one.click())")
        found = found_by_axe(page)
        page.emulate_media(color_scheme="dark")
        found += found_by_axe(page, "color-contrast")
        page.emulate_media(color_scheme="light")
        assert found == [], place
