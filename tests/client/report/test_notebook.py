"""What a notebook shows of runs, and while it follows one."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.client.course.step_history import History
from stratagem.client.course.views import Commit, Event, Phase, UserError, Worker
from stratagem.client.report.notebook import (
    ListedEvents,
    ListedRuns,
    ListedWorkers,
    follow,
    header_html,
    run_html,
)
from stratagem.client.report.pages import page
from stratagem.client.report.run import ReportedRun
from stratagem.common.base.errors import WrongStateError
from tests.client.report.reported import recorded, reported
from tests.client.report.tags import Tags


def test_a_history_says_what_is_in_it() -> None:
    series = [recorded(2, [4.0, 3.0, 2.0], certain=2)]
    history = History([*series, replace(series[0], name="busy_s", party="stage/0", observed=True)])
    assert repr(history) == "History(2 series up to step 6: train.loss, stage/0:busy_s)"
    text = history._repr_html_()
    Tags(text)
    assert "<td>6</td><td>2</td><td>1</td><td>8</td>" in text
    assert "<td>stage/0</td>" in text
    assert "observed" in text
    assert repr(History([])) == "History(0 series up to step 0)"
    Tags(History([])._repr_html_())


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


def test_lists_are_tables_for_people_and_still_tuples() -> None:
    status = reported("golden-local", submitted_at_s=1.8e9, ended_at_s=1.8e9 + 185).status
    listed = ListedRuns([status])
    assert tuple(listed) == (status,)
    text = listed._repr_html_()
    headings = ("run", "name", "strategy", "phase", "progress", "metrics", "begun", "took")
    assert "".join(f'<th scope="col">{each}</th>' for each in headings) in text
    for told in ("golden-local", "12 of 12 steps", "test.loss 0.25", "2027-01-15 08:00:00", "3:05"):
        assert told in text
    worker = Worker(
        *("w1", "inc", "h:1", True, 0.0, "cpu", "X86", 25276514304, 2, "n", (), ("gpu",), ("r",)),
        reason="",
    )
    shown = ListedWorkers([worker])._repr_html_()
    assert "<td>alive</td><td>cpu (X86)</td><td>23.5 GiB</td><td>2</td><td>r</td>" in shown
    assert "reason" not in shown
    suspect = replace(worker, quarantine="segment 3 was wrong", is_alive=False, silent_s=7.0)
    shown = ListedWorkers([suspect])._repr_html_()
    assert "<td>quarantined, lost, silent for 7 s</td>" in shown
    assert "<td>segment 3 was wrong</td>" in shown
    assert (worker.may_work, suspect.may_work) == (True, False)
    event = Event(3, 1.8e9, "Noted", "said", {}, Phase.RUNNING)
    cells = "<td>2027-01-15 08:00:00 UTC</td><td>Noted</td><td>RUNNING</td><td>said</td>"
    assert cells in ListedEvents([event])._repr_html_()
    assert ListedRuns[int]()._repr_html_() == "<p>none</p>"


def test_a_history_tells_times_and_memory_with_their_units() -> None:
    (one,) = [recorded(1, [1.8e9], certain=1)]
    names = ("time.wall_s", "worker.w1.memory_bytes")
    text = History(replace(one, name=name) for name in names)._repr_html_()
    assert "<td>2027-01-15 08:00:00 UTC</td>" in text
    assert "<td>1.7 GiB</td>" in text


def test_a_series_that_is_not_there_is_answered_with_those_that_are() -> None:
    history = History([recorded(2, [4.0], certain=1)])
    with pytest.raises(KeyError, match=r"'test\.accuracy'.*has: train\.loss; .*run\.metrics"):
        history["test.accuracy"]
    with pytest.raises(KeyError, match=r"'train\.los' in this history, which has: train\.loss.$"):
        history["train.los"]
    assert "test.accuracy" not in history
    assert history.get("test.accuracy") is None


class Notebook:
    """The shell of IPython, as far as it is asked what it shows."""

    def __init__(self, *shown: str) -> None:
        self.display_formatter = SimpleNamespace(active_types=shown)


@pytest.mark.parametrize("shell", [None, Notebook("text/plain")])
def test_where_there_is_no_notebook_nothing_is_shown_and_it_says_what_to_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: object
) -> None:
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    with pytest.raises(WrongStateError, match="stratagem attach RUN"):
        follow([1], lambda: pytest.fail("drawn"))
    assert capsys.readouterr().out == ""


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
    monkeypatch.setattr("IPython.get_ipython", lambda: Notebook("text/plain", "text/html"))
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
    page(ReportedRun.of(run.status, [*run.events, newer]), "2026-11-23 08:00:00 UTC")
