"""Display runs and lists in a notebook, and follow a run in its output.

Pictures are images within the page, so that they appear without scripts, also in a notebook that is
not trusted yet.
"""

import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final, TypeVar

from stratagem.client.course.members import progress_text, time_text, worker_state
from stratagem.client.course.population import winner_text
from stratagem.client.course.views import RunStatus
from stratagem.client.pictures.axes import duration, short, size_text
from stratagem.client.pictures.svg import NumberTable, escaped
from stratagem.client.report.panels import curve_panels
from stratagem.client.report.run import ReportedRun
from stratagem.client.report.run_panels import strategy_panels
from stratagem.common.base.errors import WrongStateError
from stratagem.common.base.text import without_spreads

Item = TypeVar("Item")
Columns = Mapping[str, Callable[[Any], str]]

WIDTH: Final = 720
REFRESH_S: Final = 0.5


class Listed(tuple[Item, ...]):
    """A tuple that a notebook displays as a table."""

    __slots__ = ()
    columns: ClassVar[Columns] = {"": str}
    """The functions that return an item's cells, keyed by column heading."""

    def _repr_html_(self) -> str:
        """Return the table as HTML, a row per item, without empty columns."""
        if not self:
            return "<p>none</p>"
        cells = {name: [_cut(cell(item)) for item in self] for name, cell in self.columns.items()}
        columns = {name: column for name, column in cells.items() if any(column)}
        return NumberTable(tuple(columns), tuple(zip(*columns.values(), strict=True))).to_html()


class ListedRuns(Listed[Item]):
    """A tuple of run statuses that a notebook displays as a table."""

    __slots__ = ()
    columns: ClassVar[Columns] = {
        "run": lambda run: run.run_id,
        "name": lambda run: run.name,
        "strategy": lambda run: run.strategy,
        "phase": lambda run: run.phase,
        "progress": progress_text,
        "metrics": lambda run: _metrics(run),
        "begun": lambda run: time_text(run.submitted_at_s),
        "took": lambda run: "" if run.seconds is None else duration(run.seconds),
    }


class ListedWorkers(Listed[Item]):
    """A tuple of workers that a notebook displays as a table."""

    __slots__ = ()
    columns: ClassVar[Columns] = {
        "worker": lambda worker: worker.worker_id,
        "state": worker_state,
        "device": lambda worker: f"{worker.device} ({worker.device_name})",
        "memory": lambda worker: size_text(worker.memory_bytes) if worker.memory_bytes else "",
        "threads": lambda worker: str(worker.num_threads or ""),
        "runs": lambda worker: ", ".join(worker.run_ids),
        "tags": lambda worker: ", ".join(worker.tags),
        "address": lambda worker: worker.address or "tunnel",
        "reason": lambda worker: worker.quarantine or worker.reason,
    }


class ListedEvents(Listed[Item]):
    """A tuple of events that a notebook displays as a table."""

    __slots__ = ()
    columns: ClassVar[Columns] = {
        "event": lambda event: str(event.index),
        "time": lambda event: time_text(event.time_s),
        "kind": lambda event: event.kind,
        "phase": lambda event: event.phase,
        "what": lambda event: event.sentence,
    }


_MAX_CELL: Final = 120
_MAX_METRICS: Final = 3


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"


def _metrics(run: RunStatus) -> str:
    """Format a few metrics: that of the best state, other evaluations, then training metrics."""
    evaluation = run.job.get("evaluation") or {}
    chief = f"{evaluation.get('split')}.{evaluation.get('best')}"
    names = sorted(
        without_spreads(run.metrics),
        key=lambda metric: (metric != chief, metric[:6] == "train.", metric != "train.loss"),
    )
    return ", ".join(f"{name} {short(run.metrics[name])}" for name in names[:_MAX_METRICS])


def header_html(status: RunStatus) -> str:
    """Return the header lines about a run, as HTML."""
    metrics = ", ".join(
        f"{name} {value:.4g}" for name, value in sorted(without_spreads(status.metrics).items())
    )
    parts = [status.strategy, status.phase, progress_text(status), metrics, status.reason]
    facts = " · ".join(escaped(part) for part in parts if part)
    winner = winner_text(status)
    more = [f"best: {winner}"] if winner else []
    if status.error is not None:
        error = status.error
        more.append(f"{error.type}: {error.message} (in your code on {error.worker_id})")
    lines = "".join(f"<br>{escaped(line)}" for line in more)
    return f"<b>{escaped(status.run_id)}</b> {facts}{lines}"


def run_html(run: ReportedRun) -> str:
    """Return a run as HTML for a notebook: a header, its losses, and its strategy's pictures."""
    panels = [*curve_panels(run)[:1], *strategy_panels(run)[:2]]
    pictures = "".join(f"<div>{panel.draw(WIDTH).to_html()}</div>" for panel in panels)
    return f"<div>{header_html(run.status)}</div>{pictures}"


def _display() -> Any:
    """Return IPython's display module. Raises WrongStateError where nothing can display HTML, as in
    a plain program or IPython's terminal."""
    try:
        shell = importlib.import_module("IPython").get_ipython()
        display = importlib.import_module("IPython.display")
    except ImportError:
        shell = None
    if shell is None or "text/html" not in shell.display_formatter.active_types:
        raise WrongStateError(
            "show() is for notebooks, and this is not one: follow the run with "
            "`stratagem attach RUN`, or `for item in run.watch(): print(item)`; run.report(path) "
            "writes a page about it"
        )
    return display


def follow(changes: Iterable[object], render: Callable[[], str]) -> None:
    """Display a run in a notebook cell, redrawn at most twice a second while it changes, and at the
    end. An interrupt only ends the display."""
    display = _display()
    make: Callable[[str], object] = display.HTML
    handle = display.display(make(render()), display_id=True)
    shown_s = time.monotonic()
    try:
        for _ in changes:
            if time.monotonic() - shown_s >= REFRESH_S:
                handle.update(make(render()))
                shown_s = time.monotonic()
        handle.update(make(render()))
    except KeyboardInterrupt:
        pass
