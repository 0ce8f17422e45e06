"""Runs beside each other: each field in which their jobs differ, and all curves in one frame."""

import pytest

from stratagem.client.report.comparison import (
    Comparison,
    JobDifference,
    job_differences,
    overlay_panels,
)
from stratagem.client.report.pages import comparison_page
from stratagem.client.report.panels import curve_panels
from tests.client.report.reported import reported
from tests.client.report.tags import Tags
from tests.odd_texts import HARMFUL, ODD_TEXTS


def test_jobs_differ_in_fields_that_are_named_by_their_path() -> None:
    first = {"name": "a", "optimizer": {"name": "sgd", "lr": 0.1}, "tags": [1, 2], "seed": 1}
    second = {"name": "a", "optimizer": {"name": "sgd", "lr": 0.2}, "tags": [1, 3], "seed": 1}
    third = {**first, "optimizer": {"name": "adam", "lr": 0.1, "betas": [0.9, 0.99]}}
    assert job_differences([first, second]) == (
        JobDifference("optimizer.lr", (0.1, 0.2)),
        JobDifference("tags", ([1, 2], [1, 3])),
    )
    assert [each.key for each in job_differences([first, second, third])] == [
        *("optimizer.betas", "optimizer.lr", "optimizer.name", "tags"),
    ]
    assert job_differences([first, third])[0] == JobDifference(
        "optimizer.betas", (None, [0.9, 0.99])
    )
    assert job_differences([first, dict(first)]) == job_differences([first]) == ()
    assert job_differences([]) == ()


def test_a_metric_of_several_runs_is_one_picture_with_a_line_for_each() -> None:
    runs = [reported("golden-local"), reported("golden-allreduce")]
    panels = {panel.name: panel for panel in overlay_panels(runs)}
    assert next(iter(panels)) == "train.loss"
    table = panels["train.loss"].draw(720).table
    lines = runs[0].course.root.lines["train.loss"], runs[1].course.root.lines["train.loss"]
    ids = [run.status.run_id for run in runs]
    assert len(table.rows) == sum(len(line.step) for line in lines)
    assert list(dict.fromkeys(row[0] for row in table.rows)) == list(dict.fromkeys(ids))
    assert overlay_panels(runs[:1])[0].draw(400).svg.startswith("<svg")


def test_a_comparison_has_the_numbers_of_all_runs_and_shows_itself_without_scripts() -> None:
    first = reported("golden-local", metrics={"test.loss": 0.25, "test.accuracy": 0.9})
    second = reported("golden-fedavg", metrics={"test.loss": 0.5})
    compared = Comparison.of([first, second])
    assert compared.metrics == {"test.accuracy": (0.9, None), "test.loss": (0.25, 0.5)}
    rows = {row[0]: row[1:] for row in compared.runs_table.rows}
    assert rows["test.accuracy"] == ("0.9", "")
    assert rows["progress"] == ("12 of 12 steps", "12 of 12 rounds")
    keys = [row[0] for row in compared.differences_table.rows]
    assert keys == [each.key for each in compared.differences]
    equal = Comparison.of([first, reported("golden-killed", job=dict(first.job))])
    assert "Their jobs are equal." in comparison_page(equal, "now")
    Tags(compared._repr_html_())


@pytest.mark.parametrize("odd", ODD_TEXTS.values(), ids=ODD_TEXTS)
def test_what_others_have_named_is_never_markup(odd: str) -> None:
    first = reported("golden-local", metrics={odd: 1.0}, strategy=odd)
    second = reported("golden-fedavg", job={**first.job, "name": odd, odd: odd})
    compared = Comparison.of([first, second])
    for text in (compared._repr_html_(), comparison_page(compared, "now")):
        assert not HARMFUL.search(text)
        Tags(text)


def test_some_steps_of_curves_fill_the_frame_and_each_run_keeps_its_colour() -> None:
    run = reported("golden-local")
    lines = run.course.root.lines
    steps = list(lines["train.loss"].step)
    assert len(steps) >= 3
    ends = float(steps[1]), float(steps[-1])
    (loss,) = [panel.draw(720) for panel in curve_panels(run, ends) if panel.name == "loss"]
    told = [int(row[1]) for row in loss.table.rows if row[0] == "train.loss"]
    assert told == steps[1:]
    assert loss.steps is not None
    assert loss.steps[:2] == ends
    assert curve_panels(run, (1e6, 2e6)) == []

    other = reported("golden-fedavg")
    assert "train.grad_norm" not in other.course.root.lines
    both = {panel.name: panel.draw(720).svg for panel in overlay_panels([other, run])}
    assert 'class="sg-s-s1"' in both["train.loss"]
    assert 'class="sg-s-s2"' in both["train.loss"]
    assert 'class="sg-s-s1"' not in both["train.grad_norm"]
    assert 'class="sg-s-s2"' in both["train.grad_norm"]
