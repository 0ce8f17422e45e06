"""Shows a run while it runs: a live line on a terminal, few lines elsewhere, or JSON.

Owns when something is printed; what it says is decided in client/terminal. Reads nothing but the
items of `watch`.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from stratagem.client.cli.options import Format
from stratagem.client.cli.reporting import make_console
from stratagem.client.sdk.views import Event, Progress
from stratagem.client.terminal.followed_run import FollowedRun
from stratagem.client.terminal.milestones import Milestone, milestone
from stratagem.client.terminal.redrawn_line import RedrawnLine
from stratagem.client.terminal.run_line import live_line, plain_line
from stratagem.client.terminal.tables import to_json
from stratagem.common.base.errors import InvalidInputError

PLAIN_INTERVAL_S: Final = 5.0
"""Where there is no terminal, a line comes at most this often, but for what goes wrong."""

VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print every event of the run, too.")
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing before the run has ended.")
]


class Detail(Enum):
    """How much is printed of a run that is followed."""

    END = auto()
    MILESTONES = auto()
    EVENTS = auto()

    @classmethod
    def of(cls, *, verbose: bool, quiet: bool) -> "Detail":
        """Return what two options ask for; raises InvalidInputError for both."""
        if verbose and quiet:
            raise InvalidInputError.at("--quiet", "is the opposite of --verbose; give one of them")
        return cls.EVENTS if verbose else cls.END if quiet else cls.MILESTONES


@dataclass(slots=True)
class RunDisplay:
    """Shows the items of one run as they come."""

    run: FollowedRun
    detail: Detail = Detail.MILESTONES
    known: int = 0
    """Events before this index have been seen; they are counted, and not said again."""
    clock: Callable[[], float] = time.monotonic
    _due_s: float = field(init=False, default=float("-inf"))
    _waits_for: str = field(init=False, default="")
    _next: int = field(init=False, default=0)
    """Index of the event that comes next."""

    def on_terminal(self, console: Console, items: Iterable[Event | Progress]) -> None:
        """Show a line that redraws itself, and above it a line per milestone."""
        with RedrawnLine(console, lambda width: live_line(self.run, width)) as line:
            line.say(Text(f"{self.run.run_id}  {self.run.strategy}"))
            for item in items:
                with line.changing():
                    found = self.told(item)
                if found:
                    line.say(Text(found.text))

    def as_lines(self, console: Console, items: Iterable[Event | Progress]) -> None:
        """Print lines with the run's id, few of them."""
        for item in items:
            is_known = self._next < self.known
            found = self.told(item)
            is_due = self.clock() >= self._due_s
            if found and (found.is_urgent or is_due or self.detail is Detail.EVENTS):
                print_line(console, f"{self.run.run_id}  {found.text}")
            elif found is None and is_due and not is_known and not self.run.phase.is_final:
                print_line(console, plain_line(self.run))
            else:
                continue
            self._due_s = self.clock() + PLAIN_INTERVAL_S

    def told(self, item: Event | Progress) -> Milestone | None:
        """Fold an item; return the line that it is worth."""
        before = self.run.phase
        self.run.update(item)
        is_known = self._next < self.known
        if isinstance(item, Event):
            self._next = item.index + 1
        if is_known:
            return None
        if isinstance(item, Progress):
            is_new, self._waits_for = item.reason not in ("", self._waits_for), item.reason
            return Milestone(f"{self.run.phase}  {item.reason}", True) if is_new else None
        if self.detail is Detail.EVENTS:
            return Milestone(f"{item.phase}  {item.sentence}", is_urgent=True)
        return milestone(before, self.run, item)


def show(
    console: Console,
    form: Format,
    items: Iterable[Event | Progress],
    shown: RunDisplay,
) -> None:
    """Show the items as they come, in the way that suits the output."""
    if shown.detail is Detail.END:
        for _ in items:
            pass
    elif form is Format.JSON:
        print_items(console, items)
    elif console.is_terminal:
        shown.on_terminal(console, items)
    else:
        shown.as_lines(console, items)


def print_items(console: Console, items: Iterable[Event | Progress]) -> None:
    """Print the items as JSON, one object per line."""
    for item in items:
        kind = "event" if isinstance(item, Event) else "progress"
        print_line(console, to_json(item, type=kind))


@contextmanager
def doing(text: str, form: Format, detail: Detail, *, stays: bool) -> Iterator[None]:
    """Say on a terminal what is being done while it is. stays: leave it there, and say it too where
    there is no terminal."""
    console = make_console()
    is_said = form is Format.TEXT and detail is not Detail.END
    if is_said and stays:
        print_line(console, text)
    is_live = is_said and not stays and console.is_terminal
    with RedrawnLine(console, lambda width: _cut(text, width)) if is_live else nullcontext():
        yield


def print_line(console: Console, text: str) -> None:
    """Print one line as it is: neither wrapped nor coloured."""
    console.print(Text(text), soft_wrap=True)


def _cut(text: str, width: int) -> Text:
    line = Text(text, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line
