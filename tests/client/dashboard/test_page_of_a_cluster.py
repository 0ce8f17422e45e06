"""The page of a cluster that trains: its numbers are those of the command line, for every strategy,
and stay complete whatever is killed."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from stratagem.client.report.comparison import job_differences, overlay_panels
from stratagem.client.report.panels import curve_panels
from stratagem.client.report.run_panels import strategy_panels
from stratagem.common.base.errors import UserCodeError
from tests.client.cli.command_line import invoke
from tests.client.dashboard.page_cluster import PageCluster, jobs, pipelined
from tests.client.dashboard.page_tabs import expect, go, tab
from tests.jobs import job, user_data, user_model

pytestmark = [pytest.mark.browser, pytest.mark.cluster]

JOBS = jobs()
EVIL = "</pre><script>document.title = 1</script><img src=x onerror=alert(1)>\x1b[2J\x07\u202e"
SHOWN = EVIL.replace("\x1b", "\\x1b").replace("\x07", "\\x07").replace("\u202e", "\\x202e")
PAIRS = """all => Object.fromEntries(all.map(each => [each.dataset.name,
  [...each.querySelectorAll('data')].map(data => [Number(data.value), data.textContent])]))"""
CELLS = "all => all.map(row => [...row.cells].map(cell => cell.textContent))"
DATA = "all => all.map(row => [...row.querySelectorAll('data')].map(data => Number(data.value)))"


@pytest.fixture(scope="module")
def at(trained: PageCluster) -> PageCluster:
    return trained


@pytest.fixture(scope="module")
def page(browser: Any, at: PageCluster) -> Iterator[Any]:
    """One tab that shows one run after the other."""
    with tab(browser, at.url) as opened:
        yield opened


def told(at: PageCluster, run: str) -> Any:
    """What the command line says of a run."""
    words = ["status", run, "--format", "json", "--coordinator", at.cluster.address]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", JOBS)
def test_the_numbers_are_those_of_the_command_line(page: Any, at: PageCluster, name: str) -> None:
    run = at.client.get(name)
    run.result()
    status = told(at, name)
    go(page, f"runs/{name}")
    expect(page.locator("h1")).to_have_text(name)
    expect(page.locator(".head .phase")).to_have_attribute("data-phase", "COMPLETED")
    assert page.locator(".head .why").inner_text() == status["reason"]
    assert status["strategy"] in page.locator(".head .quiet").inner_text()

    shown = page.locator(".numbers dl > div").evaluate_all(PAIRS)
    counted = next(iter(shown.values()))
    assert [each for each, _ in counted] == [status["step"], status["num_steps"]]
    metrics = {("loss" if k == "train.loss" else k): v for k, v in status["metrics"].items()}
    exact = {each: pair[0][0] for each, pair in shown.items() if each in metrics}
    assert exact == metrics
    for each, value in metrics.items():
        text = shown[each][0][1]
        assert float(text.replace(",", "")) == pytest.approx(value, rel=1e-3), each

    commits = page.get_by_role("region", name="Commits").last.locator("tbody tr")
    expect(commits).to_have_count(len(status["commits"]))
    for row, commit in zip(commits.evaluate_all(DATA), status["commits"], strict=True):
        assert row[:2] == [commit["segment"], commit["step"]]
        assert set(row[2:]) <= set(commit["metrics"].values())
    digests = [row[-1] for row in commits.evaluate_all(CELLS)]
    assert digests == [commit["digest"][:16] for commit in status["commits"]]

    events = page.locator(".events li")
    newest = told(at, name)["event_index"]  # one may have come after the run's end
    expect(events).to_have_count(newest + 1)
    values = run.shown()
    for panel in [*curve_panels(values), *strategy_panels(values)]:
        figure = page.locator(f"figure[data-name={json.dumps(panel.title)}]")
        expect(figure.locator("svg")).to_be_visible()
        assert_same_table(figure, panel.draw(720).table.rows)


def assert_same_table(figure: Any, rows: Any) -> None:
    """The table beside a picture has these rows."""
    if not rows:
        return
    figure.locator("summary").click()
    expect(figure.locator("tbody tr")).to_have_count(len(rows))
    assert figure.locator("tbody tr").evaluate_all(CELLS) == [list(row) for row in rows]


def test_the_list_has_the_same_numbers(page: Any, at: PageCluster) -> None:
    for name in JOBS:
        at.client.get(name).result()
    go(page, "")
    for name in JOBS:
        status = told(at, name)
        row = page.locator("tbody tr").filter(has=page.get_by_role("link", name=name, exact=True))
        expect(row.locator(".phase")).to_have_text("completed")
        ((step, num_steps, *metrics),) = row.evaluate_all(DATA)
        assert [step, num_steps] == [status["step"], status["num_steps"]]
        assert metrics
        assert set(metrics) <= set(status["metrics"].values())


def test_curves_of_several_runs_share_a_frame_and_steps_and_scale_are_chosen(
    page: Any, at: PageCluster
) -> None:
    names = ("local", "allreduce", "decentralized")
    runs = [at.client.get(name) for name in names]
    for run in runs:
        run.result()
    go(page, f"compare/{','.join(names)}")
    figures = page.locator("figure svg")
    loss = page.locator("figure[data-name='train.loss']")
    for name in names:
        expect(loss.locator("svg")).to_contain_text(name)
    (panel,) = [
        each for each in overlay_panels([run.shown() for run in runs]) if each.name == "train.loss"
    ]
    assert_same_table(loss, panel.draw(720).table.rows)
    jobs = [run.status().job for run in runs]
    rows = page.get_by_role("region", name="In what their jobs differ").locator("tbody tr")
    assert [row[0] for row in rows.evaluate_all(CELLS)] == [
        each.key for each in job_differences(jobs)
    ]

    many = figures.count()
    assert many > 2
    page.locator("#series").select_option("train.loss")
    expect(figures).to_have_count(1)
    page.locator("#from").fill("3")
    page.locator("#from").press("Enter")
    page.locator("#log").check()
    expect(loss.locator(".drawing")).to_have_attribute("data-steps", re.compile("^3 10 "))
    assert page.url.endswith(f"#/compare/{','.join(names)}?series=train.loss&from=3&log=1")
    page.reload()  # the address says all of it
    expect(figures).to_have_count(1)
    expect(loss.locator(".drawing")).to_have_attribute("data-steps", re.compile("^3 10 "))
    loss.locator("summary").click()
    steps = {row[1] for row in loss.locator("tbody tr").evaluate_all(CELLS)}
    assert steps == {str(step) for step in range(3, 11)}
    page.get_by_role("button", name="all steps").click()
    expect(loss.locator(".drawing")).to_have_attribute("data-steps", re.compile("^0 10 "))

    box = loss.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 60, steps=3)
    page.mouse.up()
    expect(page.locator("#from")).not_to_have_value("")
    first, last = (int(page.locator(each).input_value()) for each in ("#from", "#to"))
    assert 2 <= first < last <= 8
    expect(loss.locator(".drawing")).to_have_attribute(
        "data-steps", re.compile(f"^{first} {last} ")
    )


def test_what_is_killed_is_said_and_leaves_neither_gap_nor_double_point(
    browser: Any, at: PageCluster
) -> None:
    with tab(browser, at.url, complains=True) as page:  # of answers that nobody gives
        kill_both(page, at)


def kill_both(page: Any, at: PageCluster) -> None:
    """Both stages have to be there: without one the run waits, without the coordinator the page."""
    spec = pipelined("Direct").document()
    spec |= {"data": user_data("gated", folder=str(at.gates.folder))}
    at.gates.close("worker-1-batch-8")
    run = at.client.submit(spec, "killed")
    at.gates.wait_reached("worker-1-batch-8")
    go(page, "runs/killed")
    expect(page.locator(".head .phase")).to_have_attribute("data-phase", "RUNNING")
    loss = page.locator("figure[data-name='Loss']")
    expect(loss.locator("svg")).to_be_visible()

    at.held.close("worker-1", "coordinator")
    at.cluster.kill("worker-1")
    expect(page.locator(".head .phase")).to_have_attribute("data-phase", "RECOVERING")
    expect(page.locator(".head .why")).to_contain_text("worker-1")
    expect(page.locator("#banner")).to_have_text("live")
    before = page.locator(".numbers dl").inner_text()

    at.cluster.kill("coordinator")
    expect(page.locator("#banner")).to_contain_text("coordinator away for")
    assert page.locator("main.stale").count() == 1
    assert loss.locator("svg").is_visible()
    counted = page.locator(".numbers dl > div").first.inner_text()
    assert counted in before, "the last picture stays"

    at.held.open("coordinator")
    expect(page.locator("#banner")).to_have_text("live")
    assert page.locator("main.stale").count() == 0
    at.gates.open()
    at.held.open("worker-1")
    run.result()
    expect(page.locator(".head .phase")).to_have_attribute("data-phase", "COMPLETED")

    status = told(at, "killed")
    events = page.locator(".events li")
    expect(events).to_have_count(status["event_index"] + 1)
    newest = range(status["event_index"], -1, -1)
    assert events.evaluate_all("all => all.map(each => each.value)") == list(newest)
    panels = {panel.title: panel for panel in curve_panels(run.shown())}
    expect(loss.locator("svg")).to_contain_text("worker lost")
    assert_same_table(loss, panels["Loss"].draw(720).table.rows)
    rows = loss.locator("tbody tr").evaluate_all(CELLS)
    steps = [int(step.replace(",", "")) for series, step, *_ in rows if series == "train.loss"]
    assert steps == list(range(1, status["num_steps"] + 1))


def test_an_error_of_the_users_code_stands_on_top_as_text(page: Any, at: PageCluster) -> None:
    run = at.client.submit(job(user_model("acting_models:refused", text=EVIL)), "refused")
    with pytest.raises(UserCodeError):
        run.result()
    go(page, "runs/refused")
    problem = page.get_by_role("alert")
    expect(problem.locator("h2")).to_have_text(f"ValueError: {SHOWN}")
    expect(problem.locator("pre")).to_contain_text("in refused")
    page.get_by_text("Log", exact=True).click()
    expect(page.locator(".log")).to_contain_text(SHOWN)
    page.get_by_text("Job", exact=True).click()
    expect(page.get_by_role("region", name="Job")).to_contain_text("onerror=alert(1)")
    go(page, "")
    row = page.locator("tbody tr").filter(has_text="refused")
    expect(row.locator(".why")).to_contain_text(SHOWN)
    assert page.locator("main script, main img").count() == 0
    body = page.locator("body").inner_text()
    assert not [char for char in "\x1b\x07\u202e" if char in body]


def test_what_is_opened_and_where_one_stands_stays_when_the_page_changes(
    page: Any, at: PageCluster
) -> None:
    at.gates.close("worker-0-batch-8")
    spec = pipelined("Direct").document()
    spec |= {"data": user_data("gated", folder=str(at.gates.folder))}
    run = at.client.submit(spec, "opened")
    at.gates.wait_reached("worker-0-batch-8")
    go(page, "runs/opened")
    line = page.locator("figure[data-name='Time line']")
    line.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(line.locator("tbody tr").first).to_be_visible()
    before = line.locator("tbody").inner_text()
    at.gates.open()
    run.result()
    expect(page.locator(".head .phase")).to_have_attribute("data-phase", "COMPLETED")
    expect(line.locator("tbody")).not_to_have_text(before, use_inner_text=True)
    expect(line.locator("tbody tr").first).to_be_visible()
    expect(line.locator("summary")).to_be_focused()
