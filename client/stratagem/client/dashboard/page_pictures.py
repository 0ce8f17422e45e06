"""The pictures of a run as the page takes them: SVG text, and the same as a table."""

from collections.abc import Sequence
from typing import Any

from stratagem.client.dashboard.curve_view import WHOLE, CurveView
from stratagem.client.dashboard.page_values import as_json
from stratagem.client.report.curve_panels import curve_panels
from stratagem.client.report.panel import Panel
from stratagem.client.report.run_panels import strategy_panels, time_line_panel
from stratagem.client.report.run_values import ReportedRun


def drawn(run: ReportedRun, width: int, view: CurveView = WHOLE) -> str:
    """Return the pictures of a run as the page takes them, and of how many of its events they
    are."""
    pictures = pictures_of(panels_of(run, view), width, view)
    return as_json({**extent([run]), "panels": pictures})


def drawn_alone(run: ReportedRun, width: int, name: str) -> str:
    """Return one picture of a run as a file of its own; "" where it has none of the name."""
    panel = next((each for each in panels_of(run) if each.name == name), None)
    return "" if panel is None else panel.draw(width).svg_file


def extent(runs: Sequence[ReportedRun]) -> dict[str, int]:
    """Return how many events of runs are read, and how many there are."""
    read = [run.course.num_events for run in runs]
    there = [run.status.event_index + 1 for run in runs]
    return {"num_read": sum(read), "num_events": sum(map(max, read, there))}


def panels_of(run: ReportedRun, view: CurveView = WHOLE) -> list[Panel]:
    """Return what the page shows of a run, in order."""
    curves = curve_panels(run, view.steps(run.status.step))
    return [*curves, *strategy_panels(run), time_line_panel(run)]


def pictures_of(panels: Sequence[Panel], width: int, view: CurveView) -> list[dict[str, Any]]:
    """Return pictures for a width, each with the table of its numbers."""
    pictures = [
        (panel, panel.drawn(view.width_of(at, len(panels), width), log=view.log))
        for at, panel in enumerate(panels)
    ]
    return [
        {
            "title": panel.title,
            "note": panel.note,
            "svg": picture.svg,
            "steps": picture.steps,
            "headings": picture.table.headings,
            "rows": picture.table.rows,
        }
        for panel, picture in pictures
    ]
