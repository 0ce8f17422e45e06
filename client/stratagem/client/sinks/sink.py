"""Define the interface of a sink, which receives the rows and events of a run and remembers how
much it has.

A package offers a sink as an entry point in the group `stratagem.sinks`: a callable that is given
the text after the name. For "tensorboard:DIR" the class `TensorBoardSink` is called with "DIR".
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

from stratagem.client.course.views import Event, numbers, party_of
from stratagem.common.base.errors import InvalidInputError
from stratagem.common.schema.json import not_one_of

if TYPE_CHECKING:
    from stratagem.common.history.columns import Columns

# ---- Contract ----

GROUP: Final = "stratagem.sinks"


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The identity of the run that a sink records."""

    run_id: str
    name: str
    strategy: str
    submitted_at_s: float
    job: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """A block of rows of one series of the step history, sorted by step."""

    party: str
    """The party (group of workers) whose steps the rows describe; "" is the whole run."""
    series: str
    stride: int
    """The largest number of steps that one row stands for."""
    observed: bool
    """The values depend on clocks and machines, so two runs of one job differ in them."""
    columns: "Columns"

    @property
    def name(self) -> str:
        """Return the unique name of the series, with its party unless that is the whole run."""
        return f"{self.party}/{self.series}" if self.party else self.series


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position up to which a sink has the history of a run."""

    event_index: int = -1
    """The index of the last event that the sink has; -1 if it has none."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """The last step that the sink has of each series, keyed by name."""
    size: int = 0
    """The size in bytes of the sink's file up to this position; 0 if it is not a file."""


class Sink(Protocol):
    """A destination for the history of a run; all calls come from one thread. Any exception is
    reported to the user, and the sink is opened again."""

    def open(self, run: SinkRun) -> Cursor:
        """Return the sink's cursor for the run, after dropping data beyond it. Raises
        InvalidInputError if the target cannot hold the run."""
        ...

    def restart(self) -> Cursor:
        """Drop as much as possible, because the run returned to an earlier step; return the new
        cursor."""
        ...

    def rows(self, block: RowBlock) -> None:
        """Write rows; each step of a series comes once, in order."""
        ...

    def fact(self, event: Event) -> None:
        """Write an event; each comes once, in order."""
        ...

    def keep(self, cursor: Cursor) -> None:
        """Make all data so far durable, then the cursor that describes them."""
        ...

    def close(self) -> None:
        """Release resources; no other call follows."""
        ...


def values_of(event: Event) -> tuple[int, dict[str, float]]:
    """Return an event's step or round, and those of its numbers that the step history lacks.

    These belong to evaluations, to a federation's rounds, and to a population's best member.
    """
    fact = event.payload
    if party_of(event):
        return 0, {}
    metrics = numbers(fact.get("metrics"))
    match event.kind:
        case "SegmentFinished":  # training metrics are in the step history
            step, values = (
                fact["step"],
                {n: v for n, v in metrics.items() if not n.startswith("train.")},
            )
        case "Evaluated":
            step, values = fact["segment"], metrics
        case "RoundClosed":
            step, values = fact["round_num"], metrics
        case "GenerationClosed":
            step, values = fact["step"], metrics
        case _:
            step, values = 0, {}
    return int(step), values


# ---- Cursor file ----
#
# A file beside the target records how much of a run is in it.


def cursor_path(target: Path, run_id: str) -> Path:
    """Return the path of the cursor file of a run, beside the sink's file or folder."""
    return target.with_name(f".stratagem-{run_id}-{target.name}.json")


def read_cursor(path: Path) -> Cursor | None:
    """Read a cursor file; return None if it does not exist or is not valid."""
    try:
        saved = json.loads(path.read_text())
        steps = {str(name): int(step) for name, step in saved["steps"].items()}
        return Cursor(int(saved["event_index"]), steps, int(saved["size"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_cursor(path: Path, cursor: Cursor) -> None:
    """Replace a cursor file atomically."""
    text = json.dumps(
        {"event_index": cursor.event_index, "steps": dict(cursor.steps), "size": cursor.size}
    )
    beside = path.with_name(f"{path.name}.new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


# ---- Growing file ----
#
# A growing file is cut back to what its cursor says when it is opened again.


class GrowingFile:
    """A file to which one run is appended; opened again, it is cut back to its cursor."""

    def __init__(self, path: Path, run: SinkRun, begin: bytes = b"") -> None:
        """Open the file. begin: the header at the start of every such file. Raises
        InvalidInputError if the file is not of this run."""
        self._path, self._begin = path, begin
        self._cursor_path = cursor_path(path, run.run_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.cursor = read_cursor(self._cursor_path) or Cursor()
        size = path.stat().st_size if path.exists() else 0
        if size and not self._cursor_path.exists():
            text = f"{str(path)!r} exists and is not of run {run.run_id}; name another file"
            raise InvalidInputError.at("target", text)
        if size < self.cursor.size:  # cut or removed by others: write everything anew
            self.cursor = Cursor()
        write_cursor(self._cursor_path, self.cursor)
        self._file: BinaryIO = path.open("ab")
        self._file.truncate(self.cursor.size)
        if not self.cursor.size:
            self.write(begin)

    def restart(self) -> Cursor:
        """Cut the file back to its header, and return the cursor of an empty file."""
        self.cursor = Cursor()
        write_cursor(self._cursor_path, self.cursor)
        self._file.truncate(0)
        self.write(self._begin)
        return self.cursor

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def keep(self, cursor: Cursor) -> None:
        """Flush the file to disk, then write the cursor together with the file's size."""
        self._file.flush()
        os.fsync(self._file.fileno())
        size = os.fstat(self._file.fileno()).st_size
        self.cursor = Cursor(cursor.event_index, cursor.steps, size)
        write_cursor(self._cursor_path, self.cursor)

    def close(self) -> None:
        """Close the file. Data beyond the cursor are cut off when the file is opened again."""
        self._file.close()


# ---- Registry ----
#
# A text such as "csv:metrics.csv" names a sink.


def sink_names() -> list[str]:
    """Return the names of all sinks that are installed."""
    return sorted(point.name for point in entry_points(group=GROUP))


def sinks_of(texts: Iterable[str]) -> dict[str, Sink]:
    """Make the sinks named on a command line, keyed by these texts. Raises InvalidInputError for an
    unknown sink."""
    return {text: sink_of(text) for text in texts}


def sink_of(text: str) -> Sink:
    """Make the sink that NAME:TARGET describes. Raises InvalidInputError for an unknown NAME."""
    name, _, target = text.partition(":")
    points = entry_points(group=GROUP, name=name)
    if not points:
        raise InvalidInputError.at("sink", not_one_of(name, sink_names()))
    if not target:
        raise InvalidInputError.at("sink", f"{text!r} names no target; write {name}:TARGET")
    try:
        sink: Sink = next(iter(points)).load()(target)
    except ImportError as error:
        text = f"{name} needs a package that is not installed: {error}"
        raise InvalidInputError.at("sink", text) from None
    return sink
