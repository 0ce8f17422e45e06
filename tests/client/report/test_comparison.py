"""Runs beside each other: each field in which their jobs differ, and all curves in one frame."""

from stratagem.client.report.comparison import JobDifference, job_differences, overlay_panels
from tests.client.report.reported import reported


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
