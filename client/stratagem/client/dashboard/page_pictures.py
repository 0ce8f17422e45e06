"""The pictures of a run as the page takes them: SVG text, and the same as a table."""

from collections.abc import Sequence
from typing import Any

from stratagem.client.dashboard.page_values import as_json
from stratagem.client.report.panels import Panel, curve_panels, strategy_panels, time_line_panel
from stratagem.client.report.run_values import ReportedRun


def drawn(run: ReportedRun, width: int) -> str:
    """Return the pictures of a run as the page takes them."""
    return as_json(pictures_of(panels_of(run), width))


def panels_of(run: ReportedRun) -> list[Panel]:
    """Return what the page shows of a run, in order."""
    return [*curve_panels(run), *strategy_panels(run), time_line_panel(run)]


def pictures_of(panels: Sequence[Panel], width: int) -> list[dict[str, Any]]:
    """Return pictures for a width, each with the table of its numbers."""
    pictures = [(panel, panel.draw(width)) for panel in panels]
    return [
        {
            "title": panel.title,
            "note": panel.note,
            "svg": picture.svg,
            "headings": picture.table.headings,
            "rows": picture.table.rows,
        }
        for panel, picture in pictures
    ]
