"""Compare several runs: their curves in one picture, and the fields in which their jobs differ."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

from stratagem.client.course.members import progress_text
from stratagem.client.pictures.axes import duration, short
from stratagem.client.pictures.curves import Line, curve
from stratagem.client.pictures.svg import NumberTable, Picture
from stratagem.client.report.panels import (
    MAX_CURVES,
    NOTES,
    Panel,
    Steps,
    between,
    lines_of,
    unit_of,
)
from stratagem.client.report.run import ReportedRun, groups
from stratagem.common.base.errors import InvalidInputError

MAX_COMPARED: Final = 8
WIDTH: Final = 720
"""The width in pixels of pictures in a notebook."""


@dataclass(frozen=True, slots=True)
class JobDifference:
    """A field of the job in which compared runs differ."""

    key: str
    """The dotted path of the field, such as "optimizer.lr"."""
    values: tuple[Any, ...]
    """The field's value in each job, in order; None if the job has no such field."""


def job_differences(jobs: Sequence[Mapping[str, Any]]) -> tuple[JobDifference, ...]:
    """Return the fields in which jobs differ, sorted by path. Only mappings are compared field by
    field; a list is one value."""
    flat = [dict(_fields(job)) for job in jobs]
    keys = sorted({key for fields in flat for key in fields})
    rows = (JobDifference(key, tuple(fields.get(key) for fields in flat)) for key in keys)
    return tuple(row for row in rows if any(value != row.values[0] for value in row.values))


def _fields(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _fields(item, f"{above}{name}.")
        else:
            yield f"{above}{name}", item


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs side by side: their metrics and curves, and the differences of their jobs."""

    runs: tuple[ReportedRun, ...]

    @classmethod
    def of(cls, runs: Sequence[ReportedRun]) -> Self:
        """Return a comparison of 2 to 8 runs. Raises InvalidInputError for another number."""
        check_compared([run.status.run_id for run in runs])
        return cls(tuple(runs))

    @property
    def run_ids(self) -> tuple[str, ...]:
        """Return the ids of the runs, in order."""
        return tuple(run.status.run_id for run in self.runs)

    @property
    def differences(self) -> tuple[JobDifference, ...]:
        """Return the fields in which their jobs differ."""
        return job_differences([run.job for run in self.runs])

    @property
    def metrics(self) -> Mapping[str, tuple[float | None, ...]]:
        """Return for each metric its newest value in each run; None for a run without it."""
        names = sorted({name for run in self.runs for name in run.status.metrics})
        return {name: tuple(run.status.metrics.get(name) for run in self.runs) for name in names}

    @property
    def panels(self) -> list[Panel]:
        """Return a panel per metric: a curve with a line for each run."""
        return overlay_panels(self.runs)

    @property
    def runs_table(self) -> NumberTable:
        """Return a table of the runs' progress and newest metrics, with a column for each run."""
        rows: list[tuple[str, ...]] = [
            ("phase", *(run.status.phase for run in self.runs)),
            ("strategy", *(run.status.strategy for run in self.runs)),
            ("progress", *(progress_text(run.status) for run in self.runs)),
            ("time", *(duration(run.seconds) for run in self.runs)),
        ]
        for name, values in self.metrics.items():
            rows.append((name, *("" if value is None else short(value) for value in values)))
        return NumberTable(("", *self.run_ids), tuple(rows))

    @property
    def differences_table(self) -> NumberTable:
        """Return a table of the fields in which their jobs differ, with a column for each run."""
        rows = tuple((field.key, *map(_text, field.values)) for field in self.differences)
        return NumberTable(("field", *self.run_ids), rows)

    def _repr_html_(self) -> str:
        """Return the comparison as HTML for a notebook: tables, and curves as images."""
        pictures = "".join(f"<div>{panel.draw(WIDTH).to_html()}</div>" for panel in self.panels[:4])
        return f"{self.runs_table.to_html()}{self.differences_table.to_html()}{pictures}"


def check_compared(run_ids: Sequence[str]) -> None:
    """Raise InvalidInputError unless there are 2 to 8 run ids, all different."""
    if not 2 <= len(run_ids) <= MAX_COMPARED:
        text = f"names {len(run_ids)} runs, and takes 2 to {MAX_COMPARED}"
        raise InvalidInputError.at("runs", text)
    double = next((run_id for run_id in run_ids if run_ids.count(run_id) > 1), None)
    if double is not None:
        raise InvalidInputError.at("runs", f"{double!r} is named twice")


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def overlay_panels(runs: Sequence[ReportedRun], steps: Steps | None = None) -> list[Panel]:
    """Return a panel (picture) per metric: a curve with a line for each run that has the metric.
    steps: the first and the last step to show, by default all."""
    by_name: dict[str, list[Line]] = {}
    for at, run in enumerate(runs):
        lines = between(lines_of(run), steps)
        for name, line in lines.items():
            by_name.setdefault(name, []).append(replace(line, name=run.status.run_id, colour=at))
    in_order = [
        name
        for _, frame in groups({name: replace(of[0], name=name) for name, of in by_name.items()})
        for name in (line.name for line in frame)
    ]
    unit = " or ".join(dict.fromkeys(map(unit_of, runs)))
    return [_panel(by_name[name], name, unit, steps) for name in in_order[:MAX_CURVES]]


def _panel(lines: Sequence[Line], name: str, unit: str, steps: Steps | None) -> Panel:
    def draw(width: int, *, log: bool = False) -> Picture:
        frame = partial(curve, title=name, unit=unit, width=width, height=234, span=steps)
        return frame(lines, log=log)

    has_log = any(value > 0 for line in lines for value in line.last)
    return Panel(
        name, name, draw, NOTES.get(name, ""), partial(draw, log=True) if has_log else None
    )
