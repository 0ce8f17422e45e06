"""Ends a command: writes its failure or complaints to stderr and sets the exit code.

Exit codes: 0 done, 1 failed, 2 wrong use of a command (typer ends so), 130 interrupted. Owns the
wording of failures; a failure that is the user's to mend is shown without a traceback of ours.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import structlog
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from structlog.typing import EventDict, WrappedLogger

from stratagem.common.base.errors import (
    InvalidInputError,
    StratagemError,
    UnavailableError,
    UserCodeError,
)
from stratagem.common.base.text import printable
from stratagem.common.observe import tracing

UNLIMITED_WIDTH: Final = sys.maxsize
"""The width of a file or a pipe: nothing is folded there, so that paths can be copied."""

FAILED: Final = 1
INTERRUPTED: Final = 130
NO_COORDINATOR_HINT: Final = (
    "Start one with `stratagem up`, name another with --coordinator HOST:PORT or "
    "STRATAGEM_COORDINATOR, or run without a server: `stratagem run JOB --local 2`. "
    "`stratagem doctor` says more."
)


class PlainConsole(Console):
    """A console on which nothing moves but what this program moves: in all that it prints, whoever
    has written it, control characters are written out."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, Table) and not self.is_terminal:
            yield from self._unpadded(super().render(renderable, options))
            return
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)

    def _unpadded(self, table: Iterable[Segment]) -> Iterator[Segment]:
        """Yield the lines of a table without the blanks that fill it up to its width."""
        for line in Segment.split_lines(table):
            text = "".join(segment.text for segment in line).rstrip()
            if text:
                yield Segment(printable(text))
                yield Segment.line()


def make_console() -> Console:
    """Return the console for results; only a terminal has a width that tables are fitted to."""
    console = PlainConsole(highlight=False)
    return console if console.is_terminal else PlainConsole(highlight=False, width=UNLIMITED_WIDTH)


def complain(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def complain_of_warnings() -> None:
    """Show warnings of the SDK as complaints on stderr; stdout, where structlog would print, is for
    results. For a process that is the command line, and nothing else."""
    # Ctrl-C may come between the making of a call and its start; that is no fault to tell of.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    structlog.configure(
        processors=[_complaint],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    logging.getLogger("stratagem.client").handlers[:] = [_Complaints(logging.WARNING)]


class _Complaints(logging.Handler):
    """What the client tells a script by way of logging: that it waits for a coordinator."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(f"{record.levelname.lower()}: {record.getMessage()}")


def _complaint(_logger: WrappedLogger, level: str, event: EventDict) -> NoReturn:
    text = event.pop("event")
    about = ", ".join(f"{key} {value}" for key, value in event.items())
    complain(f"{level}: {text}" + (f" ({about})" if about else ""))
    raise structlog.DropEvent


@contextmanager
def reporting() -> Iterator[None]:
    """Turns what a command raises into lines on stderr and an exit code."""
    try:
        tracing.start("client")
        yield
    except KeyboardInterrupt as interrupt:
        if text := str(interrupt):  # what has become of what was under way
            complain(text)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except (StratagemError, OSError) as error:
        for line in describe(error):
            complain(line)
        raise typer.Exit(FAILED) from None
    finally:
        tracing.stop()


def describe(error: StratagemError | OSError) -> Iterator[str]:
    """The lines that tell a user about an error."""
    match error:
        case UserCodeError():
            during = f", {error.activity}" if error.activity else ""
            where = f"on {error.worker_id or 'a worker'}{during}"
            if error.traceback:
                yield error.traceback.rstrip()
                yield f"error: {error.type} in your code {where}"
            else:  # of the job, or of numbers; nothing was raised in the user's code
                yield f"error: {error.message} ({where})"
        case InvalidInputError(violations=violations) if violations:
            for violation in violations:
                yield f"error: {violation}"
        case UnavailableError() if str(error).startswith("no coordinator answers"):
            yield f"error: {error}"
            yield NO_COORDINATOR_HINT
        case OSError(filename=str(name), strerror=str(why)):
            yield f"error: {name}: {why}"
        case _:
            yield f"error: {error}"
