"""Several runs beside each other: their curves in one picture, and in what their jobs differ."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stratagem.client.pictures.curve import Line, curve
from stratagem.client.pictures.picture import Picture
from stratagem.client.report.lines import groups, with_history
from stratagem.client.report.panels import MAX_CURVES, Panel, unit_of
from stratagem.client.report.run_values import ReportedRun


@dataclass(frozen=True, slots=True)
class JobDifference:
    """A field in which jobs differ."""

    key: str
    """Its dotted path, such as "optimizer.lr"."""
    values: tuple[Any, ...]
    """By job, in order; None: the job has no such field."""


def job_differences(jobs: Sequence[Mapping[str, Any]]) -> tuple[JobDifference, ...]:
    """Return the fields in which jobs differ, by path; values that are no mappings are one field
    each, lists as a whole."""
    flat = [dict(_fields(job)) for job in jobs]
    keys = sorted({key for fields in flat for key in fields})
    found = (JobDifference(key, tuple(fields.get(key) for fields in flat)) for key in keys)
    return tuple(each for each in found if any(value != each.values[0] for value in each.values))


def _fields(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _fields(each, f"{above}{name}.")
        else:
            yield f"{above}{name}", each


def overlay_panels(runs: Sequence[ReportedRun]) -> list[Panel]:
    """Return a curve for each metric, with a line for each run that has it."""
    found: dict[str, list[Line]] = {}
    for run in runs:
        for name, line in with_history(run.course.root.lines, run.history).items():
            found.setdefault(name, []).append(replace(line, name=run.status.run_id))
    in_order = [
        name
        for _, frame in groups({name: replace(of[0], name=name) for name, of in found.items()})
        for name in (line.name for line in frame)
    ]
    unit = " or ".join(dict.fromkeys(map(unit_of, runs)))
    return [
        Panel(name, name, partial(_drawn, found[name], name, unit))
        for name in in_order[:MAX_CURVES]
    ]


def _drawn(lines: Sequence[Line], title: str, unit: str, width: int) -> Picture:
    return curve(lines, title=title, unit=unit, width=width, height=220)
