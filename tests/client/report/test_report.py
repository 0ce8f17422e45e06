"""The page of a run, for each strategy, from runs that real clusters have journaled."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from stratagem.client.history.step_history import StepSeries
from stratagem.client.report.html_page import page
from stratagem.client.report.notebook import Listed, follow, header_html, run_html
from stratagem.client.report.panels import curve_panels, strategy_panels
from stratagem.client.report.run_values import ReportedRun
from stratagem.client.sdk.views import Commit, Event, Phase, UserError
from stratagem.common.history import Columns
from tests.client.course.recorded import golden
from tests.client.pictures.samples import HOSTILE
from tests.client.report.reported import reported

MADE_AT = "2026-11-23 08:00:00 UTC"
RUNS = {
    "golden-allreduce": ["members"],
    "golden-local": ["members"],
    "golden-gossip": ["topology", "members"],
    "golden-pipeline": ["stages", "members"],
    "golden-fedavg": ["clients", "rounds", "client-times", "members"],
    "golden-silos": ["clients", "rounds", "client-times", "members"],
    "golden-population": ["lineage", "scores", "hyperparameters", "members"],
    "golden-failed": ["members"],
    "golden-waiting": ["members"],
}


class Tags(HTMLParser):
    """Checks that tags are closed in order, and keeps them with their attributes."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("run_id", RUNS)
def test_each_strategy_has_its_panel_in_a_page_without_scripts(run_id: str) -> None:
    run = reported(run_id)
    assert [panel.name for panel in strategy_panels(run)] == RUNS[run_id]
    text = page(run, MADE_AT)
    assert page(run, MADE_AT) == text
    assert page(run, "another time").replace("another time", MADE_AT) == text
    tags = Tags(text)
    assert "script" not in {tag for tag, _ in tags.found}
    for _, attributes in tags.found:
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    links = [attributes["href"] for tag, attributes in tags.found if tag == "a"]
    ids = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert links == [f"#{each}" for each in ids]
    assert len(ids) == len(set(ids)) >= 4
    # Every picture stands there for wide and for narrow screens, and as numbers.
    pictures = len(RUNS[run_id]) + len(curve_panels(run)) + 1
    assert text.count("<svg") == 2 * pictures
    assert text.count("<summary>Numbers</summary>") == pictures


def test_the_error_of_the_users_code_comes_before_everything() -> None:
    error = UserError("ValueError", "bad hidden", "Traceback\n  line 3", "worker-1", "step 3")
    text = page(reported("golden-failed", error=error, phase=Phase.FAILED), MADE_AT)
    assert text.index("bad hidden") < text.index("<nav")
    assert "in your code on worker-1, step 3" in text
    assert "Traceback\n  line 3" in text


def test_what_others_have_named_is_never_markup() -> None:
    error = UserError(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    run = reported("golden-population", error=error, reason=HOSTILE, submitted_by=HOSTILE)
    hostile = [replace(event, sentence=HOSTILE) for event in golden("golden-population")]
    job = {**run.job, "name": HOSTILE, "evaluation": {"split": HOSTILE, "best": HOSTILE}}
    changes = {"job": job, "name": HOSTILE, "error": error, "reason": HOSTILE}
    shown = ReportedRun.of(reported("golden-population", **changes).status, hostile)
    for text in (page(shown, HOSTILE), run_html(shown), Listed(hostile)._repr_html_()):
        assert not re.search(r"<script|[\x00-\x08\x0b-\x1f\u202e]", text)
        Tags(text)


def test_the_winner_of_a_population_is_said_with_its_schedule() -> None:
    text = page(reported("golden-population"), MADE_AT)
    assert "The winner&#x27;s schedule" in text or "The winner's schedule" in text
    assert "Best: member 3, model.kwargs.dropout" in text


def test_nested_parties_are_a_tree() -> None:
    text = page(reported("golden-silos"), MADE_AT)
    assert re.search(r"<ul><li>client0 .*3 segments, loss [\d.]+</span></li><li>client1 ", text)


def test_losses_share_a_frame_and_rounds_are_counted_where_there_are_rounds() -> None:
    curves = curve_panels(reported("golden-fedavg"))
    loss = curves[0].draw(720)
    assert {row[0] for row in loss.table.rows} == {"train.loss", "test.loss"}
    assert loss.table.headings[1] == "round"
    assert [row[1] for row in loss.table.rows if row[0] == "train.loss"] == ["1", "2", "3"]
    assert curves[1].name == "test.accuracy"


def recorded(stride: int, values: list[float], certain: int) -> StepSeries:
    """A series with rows of this stride, of which the first ones are certain."""
    last = np.array(values)
    step = stride * np.arange(1, len(values) + 1)
    count, nonfinite = np.isfinite(last).astype(int), (~np.isfinite(last)).astype(int)
    columns = Columns(step, last, last / 2, last * 2, count, nonfinite)
    provisional = np.arange(len(values)) >= certain
    return StepSeries("train.loss", "", stride, False, columns, provisional)


def test_the_step_history_takes_the_place_of_what_the_facts_say_of_training() -> None:
    run = reported("golden-allreduce")
    history = {
        "train.loss": recorded(2, [4.0, 3.0, float("nan"), 2.0, 1.5], certain=4),
        "train.lr": recorded(2, [0.1] * 5, certain=4),
        "train.lr.group1": recorded(2, [0.2] * 5, certain=4),
        "train.grad_norm": recorded(2, [1.0] * 5, certain=4),
    }
    curves = {panel.name: panel for panel in curve_panels(replace(run, history=history))}
    assert {"loss", "test.accuracy", "train.lr", "train.grad_norm"} <= curves.keys()
    assert "train.max_grad_norm" not in curves
    loss = curves["loss"].draw(720)
    rows = [row[1:] for row in loss.table.rows if row[0] == "train.loss"]
    assert rows[0] == ("2", "4", "2", "8")
    assert rows[2][:2] == ("6", "not finite")
    assert rows[-1] == ("10", "1.5", "0.75", "3")
    assert 'stroke-opacity="0.45"' in loss.svg, "what is not certain is paler"
    assert {row[0] for row in curves["train.lr"].draw(720).table.rows} == {
        *("train.lr", "train.lr.group1")
    }


# ---- notebooks ----


def test_a_notebook_shows_pictures_as_images_without_scripts() -> None:
    text = run_html(reported("golden-gossip"))
    tags = Tags(text)
    images = [attributes for tag, attributes in tags.found if tag == "img"]
    assert len(images) == 3
    for image in images:
        assert (image["src"] or "").startswith("data:image/svg+xml;base64,")
        assert image["alt"]
    assert {tag for tag, _ in tags.found} == {"div", "b", "img"}
    assert "golden-gossip" in text


def test_lists_are_tables_and_still_tuples() -> None:
    status = reported("golden-local").status
    listed = Listed([status])
    text = listed._repr_html_()
    assert tuple(listed) == (status,)
    assert "golden-local" in text
    assert '<th scope="col">job</th>' not in text
    assert "test.loss 0.25" in text
    assert Listed[int]()._repr_html_() == "<p>none</p>"


def test_a_header_names_the_winner_and_the_error() -> None:
    best = Commit(3, 12, "d", True, True, {"test.loss": 0.5}, "", 2, {"optimizer.lr": 0.1})
    error = UserError("KeyError", "x", "", "worker-0", "step 1")
    run = reported("golden-population", commits=(best,), error=error)
    text = header_html(run.status)
    assert "best: member 2, optimizer.lr 0.1, score 0.5" in text
    assert "KeyError: x (in your code on worker-0)" in text


class Displayed:
    """Stands in for IPython.display."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def HTML(self, text: str) -> str:
        return text

    def display(self, text: str, *, display_id: bool) -> "Displayed":
        assert display_id
        return self.update(text)

    def update(self, text: str) -> "Displayed":
        self.shown.append(text)
        return self


def following(monkeypatch: pytest.MonkeyPatch, items: Sequence[object]) -> list[str]:
    displayed = Displayed()
    monkeypatch.setitem(sys.modules, "IPython.display", displayed)
    counts = iter(range(100))

    def changes() -> Any:
        for item in items:
            if isinstance(item, BaseException):
                raise item
            yield item

    follow(changes(), lambda: f"frame {next(counts)}")
    return displayed.shown


def test_following_shows_the_first_and_the_last_frame_and_few_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Ten thousand changes come within much less than as many halves of a second.
    shown = following(monkeypatch, range(10_000))
    assert shown[0] == "frame 0"
    assert 2 <= len(shown) < 1000


def test_an_interrupt_ends_the_showing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert following(monkeypatch, [1, KeyboardInterrupt()]) == ["frame 0"]


def test_events_of_newer_versions_are_left_out() -> None:
    run = reported("golden-allreduce")
    newer = Event(99, run.events[-1].time_s, "SomethingNew", "new", {"a": 1}, Phase.COMPLETED)
    page(ReportedRun.of(run.status, [*run.events, newer]), MADE_AT)
