"""Shows a run while it runs: one live line on a terminal, plain lines elsewhere, or JSON.

Owns what the line says. Reads nothing but the items of `watch`.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from stratagem.client.cli.options import Format
from stratagem.client.cli.tables import generation_text, is_population, metrics_text, to_json
from stratagem.client.sdk.views import Event, Phase, Progress

PLAIN_INTERVAL_S: Final = 5.0
"""Plain output shows progress at most this often; events always."""


@dataclass(slots=True)
class ProgressLine:
    """Collects the latest events and progress of one run and shows them as one line."""

    name: str
    strategy: str = ""
    """By the name that people see; a population counts generations, not steps."""
    phase: Phase = Phase.PENDING
    sentence: str = ""
    latest: Progress | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def update(self, item: Event | Progress) -> None:
        match item:
            case Progress() if item.reason:
                self.sentence, self.latest = item.reason, None
            case Progress():
                self.latest = item
            case Event():
                self.phase, self.sentence = item.phase, item.sentence
                if _is_of_whole_run(item):
                    self.metrics.update(_metrics_in(item.payload.get("metrics")))

    def __str__(self) -> str:
        parts = [self.name]
        if self.phase is Phase.RUNNING and self.latest is not None:
            metrics = {**self.metrics, **self.latest.metrics}
            parts += [*_amounts(self.latest, self.strategy), metrics_text(metrics)]
        else:
            parts += [self.phase, self.sentence]
        return "  ".join(part for part in parts if part)

    def __rich__(self) -> Text:
        return Text(str(self), no_wrap=True, overflow="ellipsis")


def show(
    console: Console,
    form: Format,
    name: str,
    items: Iterable[Event | Progress],
    strategy: str = "",
) -> None:
    """Show the items as they come, in the way that suits the output."""
    if form is Format.JSON:
        _show_json(console, items)
    elif console.is_terminal:
        with live_line(console, name, strategy) as line:
            for item in items:
                line.update(item)
    else:
        _show_plain(console, ProgressLine(name, strategy), items)


@contextmanager
def live_line(console: Console, name: str, strategy: str = "") -> Iterator[ProgressLine]:
    """A line that redraws itself at each update."""
    line = ProgressLine(name, strategy)
    with Live(line, console=console, refresh_per_second=8, transient=True):
        yield line


def print_line(console: Console, text: str) -> None:
    """Print one line as it is: neither wrapped nor coloured."""
    console.print(Text(text), soft_wrap=True)


def _show_json(console: Console, items: Iterable[Event | Progress]) -> None:
    for item in items:
        kind = "event" if isinstance(item, Event) else "progress"
        print_line(console, to_json(item, type=kind))


def _show_plain(console: Console, line: ProgressLine, items: Iterable[Event | Progress]) -> None:
    next_s = 0.0
    for item in items:
        line.update(item)
        match item:
            case Event():
                print_line(console, f"{line.name}  {item.phase}  {item.sentence}")
            case Progress() if item.reason:
                print_line(console, str(line))
            case Progress():
                if time.monotonic() >= next_s:
                    print_line(console, str(line))
                    next_s = time.monotonic() + PLAIN_INTERVAL_S


def _amounts(latest: Progress, strategy: str) -> Iterator[str]:
    if latest.num_clients:
        yield f"round {latest.segment}/{latest.num_segments}"
        yield f"{latest.num_clients_done} of {latest.num_clients} clients"
    elif is_population(strategy):
        yield generation_text(latest)
    else:
        yield f"step {latest.step}/{latest.num_steps}"
    if latest.strategy_phase not in ("", "TRAINING"):
        yield latest.strategy_phase.lower()
    if latest.training_phase:
        yield latest.training_phase.lower()
    if latest.loss:
        yield f"loss {latest.loss:.4f}"
    if latest.num_skipped_steps:
        yield f"{latest.num_skipped_steps} steps skipped"
    if latest.rows_per_s:
        yield f"{latest.rows_per_s:,.0f} rows/s"


def _is_of_whole_run(event: Event) -> bool:
    """Return whether the event is of the whole run, and not of one client, member or silo that
    happens to be the newest."""
    return event.kind != "UpdateReceived" and not event.payload.get("party")


def _metrics_in(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    return {name: number for name, number in value.items() if isinstance(number, int | float)}
