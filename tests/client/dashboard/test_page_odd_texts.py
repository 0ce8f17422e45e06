"""The page in a real browser of a journal with odd text in all that others have named: metrics,
workers, clients' reasons, errors and logs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.ids import RunId
from stratagem.coordinator.observe.logs import RunLogLine
from stratagem.coordinator.store.journal import Journal, Record
from stratagem.coordinator.store.lead import Holder
from tests.client.dashboard.page_rig import PageRig, rig
from tests.client.dashboard.page_shape import misplaced
from tests.client.dashboard.page_tabs import expect, go, tab
from tests.golden.replay import FOLDER, load
from tests.odd_texts import HARMFUL, MOVING, ODD_TEXTS

pytestmark = pytest.mark.browser

RUNS = ("golden-local", "golden-fedavg", "golden-failed", "golden-population")
TEXTS = tuple(ODD_TEXTS.values())
ALL = "\n".join(TEXTS)
WIDTHS = (1280, 390)


def odd(value: Any, at: list[int]) -> Any:
    """A payload with odd text where others name something; at: counts what was named."""
    if isinstance(value, Mapping):
        found = {key: _odd_field(key, each, at) for key, each in value.items()}
        if found.get("metrics"):
            found["metrics"] = {**found["metrics"], **dict.fromkeys(TEXTS, 0.5)}
        return found
    return [odd(each, at) for each in value] if isinstance(value, list) else value


def _odd_field(key: str, value: Any, at: list[int]) -> Any:
    if key == "worker_id" and value:
        return f"{value} {TEXTS[int(value[-1]) % len(TEXTS)]}"
    if key in ("reason", "message", "type", "traceback", "activity") and isinstance(value, str):
        at[0] += 1
        return ALL if key == "traceback" else f"{value} {TEXTS[at[0] % len(TEXTS)]}"
    return odd(value, at)


def write_odd_journal(place: Path, folder: Path) -> None:
    golden = load(FOLDER / "0.2.0.sql", folder / "golden.sqlite")
    found = [stored.record for run in RUNS for stored in golden.read(RunId(run))]
    golden.close()
    at = [0]
    records: list[Record] = []
    for each in found:
        payload = json.loads(each.payload)
        changed = payload if each.kind == "RunSubmitted" else odd(payload, at)
        records.append(replace(each, payload=json.dumps(changed)))
    journal = Journal.open(str(place))
    lead = journal.take_lead(Holder.of_this_process(), ttl_s=10)
    journal.append(lead.term, records)
    journal.release(lead.term)
    journal.close()


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageRig]:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "data").mkdir(mode=0o700)
    write_odd_journal(folder / "data" / "journal.sqlite", folder)
    with rig(folder / "data") as made:
        for run in RUNS:
            for text in TEXTS:
                made.app.logs.add(RunId(run), RunLogLine(1.0, f"w {text[:40]}", "PRINT", text))
        yield made


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("run", RUNS)
def test_odd_text_is_shown_as_text_and_breaks_nothing(
    browser: Any, at: PageRig, run: str, width: int
) -> None:
    with tab(browser, at.url, width=width) as page:
        go(page, f"runs/{run}")
        expect(page.locator("figure svg").first).to_be_visible()
        expect(page.locator(".events li")).not_to_have_count(0)
        page.get_by_text("Log", exact=True).click()
        expect(page.locator(".log")).to_contain_text("\\x1b]0;title")
        for each in page.locator("figure summary").all():
            each.click()
        assert page.title() == f"{run} · Stratagem"
        assert page.locator("main script, main img, main style").count() == 0
        assert not MOVING.search(page.locator("body").inner_text())
        assert misplaced(page) == []
        if run == "golden-local":
            names = page.locator("figure").evaluate_all("all => all.map(each => each.dataset.name)")
            assert ODD_TEXTS["an attribute"] in names, "curves of what has odd names"
        if run == "golden-failed":
            problem = page.locator("section.problem")
            expect(problem).to_be_visible()
            expect(problem.locator("pre")).to_contain_text(
                "<script>document.title = 'taken'</script>"
            )
        go(page, "")
        expect(page.locator("tbody tr")).to_have_count(len(RUNS))
        assert not MOVING.search(page.locator("body").inner_text())
        assert misplaced(page) == []


@pytest.mark.parametrize("run", RUNS)
def test_reports_and_pictures_at_addresses_of_their_own_run_nothing(
    browser: Any, at: PageRig, run: str
) -> None:
    with tab(browser, at.url) as page:
        origin = page.url.partition("#")[0].rstrip("/")
        for path in (f"/report/{run}.html", f"/pictures/members.svg?run={run}"):
            response = page.goto(origin + path)
            assert response.status == 200
            assert not HARMFUL.search(response.text().replace("\n", ""))
            assert page.title() != "taken"
            assert page.locator("script, img").count() == 0
        page.goto(at.url)
        expect(page.locator("#banner")).to_have_text("live")
