"""Runs in a notebook: what it shows of a run and of lists, and following a run in place.

Pictures are images within the page, so that they are shown without scripts, and in a notebook that
nobody has trusted yet.
"""

import base64
import importlib
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeVar

from stratagem.client.course.population import winner_text
from stratagem.client.pictures.drawing.scales import short
from stratagem.client.pictures.drawing.svg import escaped
from stratagem.client.pictures.picture import NumberTable, Picture
from stratagem.client.report.panels import curve_panels, strategy_panels
from stratagem.client.report.run_values import ReportedRun, StatusLike
from stratagem.common.base.errors import WrongStateError

Item = TypeVar("Item")

WIDTH: Final = 720
REFRESH_S: Final = 0.5


class Listed(tuple[Item, ...]):
    """A tuple that a notebook shows as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the values of all items by name, without what is longer than a line."""
        if not self:
            return "<p>none</p>"
        columns = [name for name in getattr(self[0], "__slots__", ()) if name not in _LONG]
        rows = tuple(tuple(_cell(getattr(each, name)) for name in columns) for each in self)
        shown = [at for at, _ in enumerate(columns) if any(row[at] for row in rows)]
        kept = tuple(tuple(row[at] for at in shown) for row in rows)
        return NumberTable(tuple(columns[at] for at in shown), kept).to_html()


_LONG: Final = ("payload", "job", "commits", "error", "numerics", "incarnation")
_MAX_CELL: Final = 120


def _cell(value: object) -> str:
    match value:
        case None | "" | () | False:
            return ""
        case float():
            return short(value)
        case dict():
            text = ", ".join(f"{name} {_cell(each)}" for name, each in sorted(value.items()))
        case tuple():
            text = ", ".join(map(str, value))
        case _:
            text = str(value)
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 1]}…"


def header_html(status: StatusLike) -> str:
    """Return a run in a few lines."""
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(status.metrics.items()))
    steps = f"step {status.step} of {status.num_steps}" if status.num_steps else ""
    parts = [status.strategy, status.phase, steps, metrics, status.reason]
    shown = " · ".join(escaped(part) for part in parts if part)
    winner = winner_text(status)
    more = [f"best: {winner}"] if winner else []
    if status.error is not None:
        error = status.error
        more.append(f"{error.type}: {error.message} (in your code on {error.worker_id})")
    lines = "".join(f"<br>{escaped(line)}" for line in more)
    return f"<b>{escaped(status.run_id)}</b> {shown}{lines}"


def run_html(run: ReportedRun) -> str:
    """Return a run as it is shown in a notebook: a header, its losses, and its strategy."""
    panels = [*curve_panels(run)[:1], *strategy_panels(run)[:2]]
    pictures = "".join(f"<div>{_image(panel.draw(WIDTH))}</div>" for panel in panels)
    return f"<div>{header_html(run.status)}</div>{pictures}"


def _image(picture: Picture) -> str:
    data = base64.b64encode(picture.svg_file.encode()).decode()
    words = escaped(f"{picture.title}: {picture.description}")
    return f'<img alt="{words}" src="data:image/svg+xml;base64,{data}">'


class _Handle(Protocol):
    def update(self, shown: object) -> None: ...


def _display() -> Any:
    """Return IPython's module for outputs, which is not of the base install: notebooks have it."""
    try:
        return importlib.import_module("IPython.display")
    except ImportError:
        raise WrongStateError("show() is for notebooks: there is no IPython here") from None


def follow(changes: Iterable[object], render: Callable[[], str]) -> None:
    """Show a run in the cell of a notebook, again and again while it changes, at most twice a
    second, and a last time at the end. An interrupt ends the showing alone."""
    display = _display()
    make: Callable[[str], object] = display.HTML
    handle: _Handle = display.display(make(render()), display_id=True)
    shown_s = time.monotonic()
    try:
        for _ in changes:
            if time.monotonic() - shown_s >= REFRESH_S:
                handle.update(make(render()))
                shown_s = time.monotonic()
        handle.update(make(render()))
    except KeyboardInterrupt:
        pass
