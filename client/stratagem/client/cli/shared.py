"""Define options that commands share, the exit of a command, and the display of a run."""

import inspect
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import structlog
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from structlog.typing import EventDict, WrappedLogger

from stratagem.client.course.views import Event, Progress
from stratagem.client.local.cluster import local_names
from stratagem.client.sdk.blocking import Client
from stratagem.client.sdk.client import ADDRESS_VARIABLE, DEFAULT_ADDRESS
from stratagem.client.terminal.completion import run_ids, sink_forms
from stratagem.client.terminal.followed import FollowedRun
from stratagem.client.terminal.line import Milestone, RedrawnLine, live_line, milestone, plain_line
from stratagem.client.terminal.tables import to_json
from stratagem.common.base.errors import (
    InvalidInputError,
    StratagemError,
    UnavailableError,
    UserCodeError,
)
from stratagem.common.base.text import printable
from stratagem.common.identity.tls import tls_files
from stratagem.common.observe import tracing
from stratagem.common.rpc.channel import PLAINTEXT, Proof
from stratagem.common.schema.json import not_one_of

# ---- Options ----

DATA_DIR: Final = Path(".stratagem")


class Format(StrEnum):
    """The output format: text for people, json for programs (one object per line of a stream)."""

    TEXT = "text"
    JSON = "json"


CoordinatorOption = Annotated[
    str,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT[,HOST:PORT]",
        envvar=ADDRESS_VARIABLE,
        show_default=DEFAULT_ADDRESS,
        help="Address of the coordinator, or of several of which one leads.",
    ),
]
OptionalCoordinatorOption = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Also take the workers of this coordinator into account.",
    ),
]
"""The option of commands that also work without a coordinator."""
FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
LocalOption = Annotated[
    int | None,
    typer.Option(
        "--local",
        metavar="N",
        min=1,
        help="Run without a server: start a coordinator and N workers for this command.",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="T",
        min=1,
        show_default="OMP_NUM_THREADS, else 1",
        help="Number of threads of each worker; use several for a large model. Results are "
        "bit-identical only with the same number.",
    ),
]
TagOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tag",
        metavar="[WORKER=]TAG",
        help="Tag for one local worker (worker-0, worker-1, ...) or for all; repeatable.",
    ),
]
DataDirOption = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="Folder for the journal, states and logs of a local cluster.",
    ),
]
WebOption = Annotated[
    bool,
    typer.Option("--web", help="Also serve the dashboard while this command runs."),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The id of a run.", autocompletion=run_ids)
]
RunsArgument = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="The ids of runs.", autocompletion=run_ids),
]
WhichOption = Annotated[
    str,
    typer.Option(
        "--which",
        metavar="WHICH",
        help="State to take: final (or the newest so far), best, the number of a segment, "
        "average, or predictions.",
    ),
]
LogToOption = Annotated[
    list[str] | None,
    typer.Option(
        "--log-to",
        metavar="SINK:TARGET",
        help="Log the steps to csv:FILE, jsonl:FILE, tensorboard:FOLDER, mlflow:URI or "
        "wandb:PROJECT; repeatable.",
        autocompletion=sink_forms,
    ),
]


def tag_arguments(tags: Sequence[str], num_workers: int) -> dict[str, tuple[str, ...]]:
    """Return each local worker's tag arguments. tags: texts TAG, for all workers, or WORKER=TAG."""
    names = local_names(num_workers)
    tags_by_worker: dict[str, list[str]] = {name: [] for name in names}
    for pair in tags:
        worker, _, tag = pair.rpartition("=")
        if worker and worker not in tags_by_worker:
            raise InvalidInputError.at("--tag", f"{not_one_of(worker, names)}")
        if not tag:
            raise InvalidInputError.at("--tag", f"{pair!r} has no tag")
        for name in [worker] if worker else names:
            tags_by_worker[name].append(tag)
    return {name: ("--tags", ",".join(of_one)) for name, of_one in tags_by_worker.items() if of_one}


# ---- Commands ----
#
# Options of several commands are declared once, with a function that makes a value of them.


@dataclass(frozen=True, slots=True)
class MadeBy:
    """A marker for a parameter of a command whose value another function makes: the parameters of
    that function become options of the command instead."""

    make: Callable[..., Any]


def as_command(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function as a typer command. The parameters of functions marked MadeBy become its
    options, and an error becomes lines on stderr and an exit code."""

    def call(**given: Any) -> None:
        with reporting():
            _call(function, given)

    options = list(_options(function))
    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__annotations__ = {option.name: option.annotation for option in options}
    call.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return call


def _options(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for parameter, make in _parameters(function):
        if make is not None:
            yield from _options(make)
        else:
            yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a function with the options in `given` and the values that its MadeBy options make."""
    return function(
        **{
            parameter.name: given[parameter.name] if make is None else _call(make, given)
            for parameter, make in _parameters(function)
        }
    )


def _parameters(
    function: Callable[..., Any],
) -> Iterator[tuple[inspect.Parameter, Callable[..., Any] | None]]:
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        marks = getattr(parameter.annotation, "__metadata__", ())
        yield parameter, next((mark.make for mark in marks if isinstance(mark, MadeBy)), None)


def _proof(
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            metavar="FILE",
            envvar="STRATAGEM_TLS_CA",
            help="CA certificates used to verify the coordinator.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            envvar="STRATAGEM_TLS_CERT",
            help="Your client certificate.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            "--tls-key",
            metavar="FILE",
            envvar="STRATAGEM_TLS_KEY",
            help="Private key of --tls-cert.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            envvar="STRATAGEM_TOKEN_FILE",
            help="File with your token, which replaces a client certificate.",
        ),
    ] = None,
) -> Proof:
    return Proof(tls_files(tls_ca, tls_cert, tls_key, needs_cert=False), token_file)


ProofOptions = Annotated[Proof, MadeBy(_proof)]


@dataclass(frozen=True, slots=True)
class Access:
    """The address of a coordinator, and the caller's proof of identity: certificates or a token."""

    coordinator: CoordinatorOption = DEFAULT_ADDRESS
    proof: ProofOptions = PLAINTEXT

    def client(self) -> Client:
        """Return a blocking client of the coordinator."""
        return Client(self.coordinator, tls=self.proof.tls, token_file=self.proof.token_file)


AccessOptions = Annotated[Access, MadeBy(Access)]


# ---- Exit codes and failures ----
#
# A command ends by writing its failure or complaints to stderr and setting the exit code.
#
# Exit codes are 0 for success, 1 for failure, 2 for wrong use of a command (set by typer), and
# 130 for an interrupt. A failure that the user can correct is shown without a traceback.

UNLIMITED_WIDTH: Final = sys.maxsize
"""The console width for files and pipes: no line is folded, so that paths can be copied."""

FAILED: Final = 1
INTERRUPTED: Final = 130
NO_COORDINATOR_HINT: Final = (
    "Start one with `stratagem up`, name another with --coordinator HOST:PORT or "
    "STRATAGEM_COORDINATOR, or run without a server: `stratagem run JOB --local 2`. "
    "`stratagem doctor` says more."
)


class PlainConsole(Console):
    """A console that escapes control characters in texts: only this program moves the cursor."""

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
        """Yield the lines of a table without trailing blanks."""
        for line in Segment.split_lines(table):
            text = "".join(segment.text for segment in line).rstrip()
            if text:
                yield Segment(printable(text))
                yield Segment.line()


def make_console() -> Console:
    """Return the console for results; tables are fitted to its width only if it is a terminal."""
    console = PlainConsole(highlight=False)
    return console if console.is_terminal else PlainConsole(highlight=False, width=UNLIMITED_WIDTH)


def complain(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def complain_of_warnings() -> None:
    """Print the SDK's warnings on stderr, because stdout, to which structlog prints by default, is
    for results. Call it only in a process that runs the command line."""
    # Ctrl-C may come between making a coroutine and starting it, which is not a fault.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    structlog.configure(
        processors=[_complaint],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    logging.getLogger("stratagem.client").handlers[:] = [_Complaints(logging.WARNING)]


class _Complaints(logging.Handler):
    """A log handler that prints the client's warnings, such as that it waits for a coordinator."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(f"{record.levelname.lower()}: {record.getMessage()}")


def _complaint(_logger: WrappedLogger, level: str, event: EventDict) -> NoReturn:
    text = event.pop("event")
    about = ", ".join(f"{key} {value}" for key, value in event.items())
    complain(f"{level}: {text}" + (f" ({about})" if about else ""))
    raise structlog.DropEvent


@contextmanager
def reporting() -> Iterator[None]:
    """Context manager that turns an exception into lines on stderr and an exit code."""
    try:
        tracing.start("client")
        yield
    except KeyboardInterrupt as interrupt:
        if text := str(interrupt):  # the outcome of the interrupted work
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
    """Yield the lines that explain an error to the user."""
    match error:
        case UserCodeError():
            during = f", {error.activity}" if error.activity else ""
            where = f"on {error.worker_id or 'a worker'}{during}"
            if error.traceback:
                yield error.traceback.rstrip()
                yield f"error: {error.type} in your code {where}"
            else:  # an error of the job or of its numbers, not raised by the user's code
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


# ---- Progress ----
#
# A followed run is shown as a live line on a terminal, as few lines elsewhere, or as JSON. This
# section decides when something is printed; client/terminal decides the text. It reads only the
# items of `watch`.

PLAIN_INTERVAL_S: Final = 5.0
"""The shortest time between two progress lines without a terminal; failures appear at once."""

VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also print every event of the run.")
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing until the run has ended.")
]


class Detail(Enum):
    """The amount of output about a run that a command follows."""

    END = auto()
    MILESTONES = auto()
    EVENTS = auto()

    @classmethod
    def of(cls, *, verbose: VerboseOption = False, quiet: QuietOption = False) -> "Detail":
        """Return the amount that --verbose or --quiet asks for; with both, raise
        InvalidInputError."""
        if verbose and quiet:
            raise InvalidInputError.at("--quiet", "is the opposite of --verbose; give one of them")
        return cls.EVENTS if verbose else cls.END if quiet else cls.MILESTONES


DetailOptions = Annotated[Detail, MadeBy(Detail.of)]


@dataclass(frozen=True, slots=True)
class View:
    """The format and the amount of a command's output."""

    form: Format
    detail: Detail

    @contextmanager
    def doing(self, text: str, *, stays: bool = False) -> Iterator[None]:
        """Context manager that shows a text on a terminal while its block runs. stays: print the
        text as an ordinary line instead, also without a terminal."""
        console = make_console()
        is_said = self.form is Format.TEXT and self.detail is not Detail.END
        if is_said and stays:
            print_line(console, text)
        is_live = is_said and not stays and console.is_terminal
        with RedrawnLine(console, lambda width: _cut(text, width)) if is_live else nullcontext():
            yield


@dataclass(slots=True)
class RunDisplay:
    """The display of one followed run, updated by each event and progress message ("item")."""

    run: FollowedRun
    detail: Detail = Detail.MILESTONES
    first_event: int = 0
    """The index of the first event to show; earlier ones are only counted."""
    clock: Callable[[], float] = time.monotonic
    _due_s: float = field(init=False, default=float("-inf"))
    _waits_for: str = field(init=False, default="")
    _next: int = field(init=False, default=0)
    """The index of the next expected event."""

    def on_terminal(self, console: Console, items: Iterable[Event | Progress]) -> None:
        """Show the run as a line that redraws itself, with a line per milestone above it."""
        with RedrawnLine(console, lambda width: live_line(self.run, width)) as line:
            line.say(Text(f"{self.run.run_id}  {self.run.strategy}"))
            for item in items:
                with line.changing():
                    news = self.fold(item)
                if news:
                    line.say(Text(news.text))

    def as_lines(self, console: Console, items: Iterable[Event | Progress]) -> None:
        """Print the run as a few plain lines, each with the run's id."""
        for item in items:
            is_known = self._next < self.first_event
            news = self.fold(item)
            is_due = self.clock() >= self._due_s
            if news and (news.is_urgent or is_due or self.detail is Detail.EVENTS):
                print_line(console, f"{self.run.run_id}  {news.text}")
            elif news is None and is_due and not is_known and not self.run.phase.is_final:
                print_line(console, plain_line(self.run))
            else:
                continue
            self._due_s = self.clock() + PLAIN_INTERVAL_S

    def fold(self, item: Event | Progress) -> Milestone | None:
        """Update the state by an item; return the line to print for it, or None to print none."""
        before = self.run.phase
        self.run.update(item)
        is_known = self._next < self.first_event
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
    display: RunDisplay,
) -> None:
    """Display the items of a run as they arrive, in the form that suits the output."""
    if display.detail is Detail.END:
        for _ in items:
            pass
    elif form is Format.JSON:
        print_items(console, items)
    elif console.is_terminal:
        display.on_terminal(console, items)
    else:
        display.as_lines(console, items)


def print_items(console: Console, items: Iterable[Event | Progress]) -> None:
    """Print the items as JSON, one object per line."""
    for item in items:
        kind = "event" if isinstance(item, Event) else "progress"
        print_line(console, to_json(item, type=kind))


def print_line(console: Console, text: str) -> None:
    """Print one line unchanged: neither wrapped nor coloured."""
    console.print(Text(text), soft_wrap=True)


def _cut(text: str, width: int) -> Text:
    line = Text(text, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line
