"""The pictures of a run by its strategy, each made for the width that it is asked for."""

from functools import partial

from stratagem.client.pictures.decisions import DecisionMark, decisions
from stratagem.client.pictures.picture import Picture
from stratagem.client.pictures.time_line import time_line
from stratagem.client.report.member_panels import member_panels
from stratagem.client.report.nested_panels import nested_panels, own_panels
from stratagem.client.report.panel import Panel, by_width
from stratagem.client.report.run_values import ReportedRun


def strategy_panels(run: ReportedRun) -> list[Panel]:
    """Return the pictures that belong to the run's strategy, and those of the parties in it."""
    return [*_of_root(run), *member_panels(run), *nested_panels(run)]


def _of_root(run: ReportedRun) -> list[Panel]:
    match run.strategy.get("type"):
        case "Custom":
            return _decisions(run)
        case _:
            return own_panels(run)


def _decisions(run: ReportedRun) -> list[Panel]:
    """Return what a strategy of somebody's own has decided."""
    marks = [
        DecisionMark(
            each.after_s, f"{each.party}: {each.kind}" if each.party else each.kind, each.reason
        )
        for each in run.course.decisions
    ]
    if not marks:
        return []
    draw = partial(decisions, marks, title="Decisions", end=run.seconds)
    newest = marks[-1]
    return [
        Panel("decisions", "Decisions", by_width(draw), f"The newest: {newest.kind} {newest.text}.")
    ]


def time_line_panel(run: ReportedRun) -> Panel:
    """Return what happened when, in a lane for each kind of thing."""
    spans = run.course.time_marks.spans

    def draw(width: int) -> Picture:
        return time_line(spans, title="Time line", width=width, end=run.seconds)

    return Panel("time-line", "Time line", draw)
