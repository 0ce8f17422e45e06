"""Record the steps of a segment, pack rows for storage and the wire, and encode stage actions."""

import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, Self

import numpy as np

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.text import is_printable
from stratagem.common.history.columns import (
    EMPTY,
    MAX_ROWS,
    ROW_BYTES,
    Columns,
    concatenated,
    from_bytes,
    from_values,
    in_planes,
    joined,
    out_of_planes,
    part_of,
)

# ---- Recording ----
#
# There is one recorder per party and segment. `add` is called in every step, so it only keeps the
# values, which are put in rows many at once.

MAX_SERIES: Final = 256
"""The largest number of recorded series per party; further series are dropped."""
MAX_NAME: Final = 128
"""The largest number of characters in the name of a series."""


class Series(NamedTuple):
    """The name of a series of values, and whether the values depend on clocks and machines."""

    name: str
    observed: bool = False


SeriesRows = Mapping[Series, Columns]
"""The rows of several series, keyed by series."""

_MAX_PENDING: Final = 2048
"""The number of calls of `add` after which pending values are merged into rows."""


@dataclass(slots=True)
class _SeriesRecorder:
    """The recorder of one series: its rows so far, and pending values that are not in a row yet."""

    step: int = 0
    """The step of the newest value."""
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    rows: Columns = EMPTY
    num_closed: int = 0
    """The number of closed rows: those before the last one, which get no more values."""
    num_taken: int = 0

    def fold(self, stride: int) -> None:
        """Merge pending values into rows; the last row stays open for values of later steps."""
        if self.steps:
            closed = part_of(self.rows, 0, self.num_closed)
            opened = part_of(self.rows, self.num_closed, len(self.rows))
            newer = joined([opened, from_values(self.steps, self.values)], stride)
            self.rows = concatenated([closed, newer])
            self.num_closed = len(self.rows) - 1
            self.steps, self.values = [], []

    def take_closed(self) -> Columns:
        """Return the series' rows that were completed (closed) since the last call."""
        start, self.num_taken = self.num_taken, self.num_closed
        return part_of(self.rows, start, self.num_closed)


class Recorder:
    """A recorder of values per step, in ascending order of steps; not thread-safe."""

    def __init__(self, stride: int, from_step: int) -> None:
        self.stride: Final = stride
        self.from_step: Final = from_step
        """The number of steps already done when the recording began."""
        self.dropped: set[str] = set()
        """The names of series not recorded: there were too many, or the name was too long."""
        self._series: dict[Series, _SeriesRecorder] = {}
        self._num_pending = 0

    @classmethod
    def going_on(cls, stride: int, from_step: int, rows: SeriesRows) -> "Recorder":
        """Make a recorder that continues from rows that another recorder's `rows` returned."""
        recorder = cls(stride, from_step)
        for series, columns in rows.items():
            if len(columns):
                its = _SeriesRecorder(int(columns.step[-1]), rows=columns)
                its.num_closed = len(columns) - 1
                recorder._series[series] = its
        return recorder

    def add(self, step: int, values: Iterable[tuple[Series, float]]) -> None:
        """Record values of several series at a step; a series ignores steps up to its newest."""
        recorded = self._series
        for series, value in values:
            its = recorded.get(series) or self._begin_series(series)
            if its is not None and step > its.step:
                its.step = step
                its.steps.append(step)
                its.values.append(value)
        self._num_pending += 1
        if self._num_pending >= _MAX_PENDING:
            self._fold()

    def _begin_series(self, series: Series) -> _SeriesRecorder | None:
        if len(self._series) >= MAX_SERIES or not is_series_name(series.name):
            self.dropped.add(series.name)
            return None
        return self._series.setdefault(series, _SeriesRecorder())

    def _fold(self) -> None:
        for its in self._series.values():
            its.fold(self.stride)
        self._num_pending = 0

    def take(self) -> SeriesRows:
        """Return the rows that were completed (closed) since the last call."""
        self._fold()
        closed = {series: its.take_closed() for series, its in self._series.items()}
        return {series: rows for series, rows in closed.items() if len(rows)}

    def rewind(self) -> None:
        """Make the next call of `take` return all closed rows again, from the first one on."""
        for its in self._series.values():
            its.num_taken = 0

    def end(self) -> SeriesRows:
        """Close all rows that are still open, and return the rows closed since the last call."""
        self._fold()
        for its in self._series.values():
            its.num_closed = len(its.rows)
        return self.take()

    def rows(self) -> SeriesRows:
        """Return all rows from the first step on, open ones included, so that a member that copies
        this member's state can continue the recording."""
        self._fold()
        return {series: its.rows for series, its in self._series.items() if len(its.rows)}


def is_series_name(name: str) -> bool:
    """Return whether the text is a valid name of a series."""
    return 0 < len(name) <= MAX_NAME and is_printable(name)


# ---- Packing ----
#
# Packed rows go over the wire and into the journal's database.
#
# The rows of several series are compressed together: the length of a JSON head, the head (name,
# whether it is observed, and number of rows of each series), the columns, each with the rows of
# one series after those of the other. A byte before the compressed ones says that the numbers of
# the columns stand in planes; rows from versions without planes begin without it. The unpacked
# size is checked against a limit before allocation, as packed rows may come from anybody.

MAX_PART_BYTES: Final = 256 * 1024
"""The largest size of one packed part of a recording."""
MAX_UNPACKED_BYTES: Final = MAX_SERIES * (MAX_ROWS + 1) * ROW_BYTES + (1 << 18)
"""The largest size of the unpacked rows and names of one recording."""

_PART_ROWS: Final = 5000
"""The number of rows that fit in one packed part even if compression saves nothing."""
_LEVEL: Final = 3
"""The zlib level, with an output some percent larger than at a higher level, in half the time."""
_LENGTH: Final = struct.Struct("<I")
_IN_PLANES: Final = b"\x01"
"""The first byte of rows packed in planes; older packed rows begin with zlib's byte."""


def pack(rows: SeriesRows) -> bytes:
    """Pack and compress the rows of all series; equal rows in equal order give equal bytes."""
    head = [[series.name, series.observed, len(columns)] for series, columns in rows.items()]
    text = json.dumps(head, separators=(",", ":")).encode()
    body = in_planes(concatenated([*rows.values()]).to_bytes())
    return _IN_PLANES + zlib.compress(b"".join([_LENGTH.pack(len(text)), text, body]), _LEVEL)


def packed_parts(rows: SeriesRows) -> Iterator[bytes]:
    """Yield the rows as packed parts of at most MAX_PART_BYTES; nothing if there are no rows."""
    part: dict[Series, Columns] = {}
    room = _PART_ROWS
    for series, columns in rows.items():
        start = 0
        while start < len(columns):
            piece = part_of(columns, start, start + room)
            part[series] = piece
            start, room = start + len(piece), room - len(piece)
            if not room:
                yield pack(part)
                part, room = {}, _PART_ROWS
    if part:
        yield pack(part)


def unpack(data: bytes, max_bytes: int = MAX_UNPACKED_BYTES) -> dict[Series, Columns]:
    """Undo `pack`. Raises InvalidInputError for invalid bytes, and for more than max_bytes before
    they are decompressed."""
    has_planes = data.startswith(_IN_PLANES)
    raw = _inflated(data[len(_IN_PLANES) :] if has_planes else data, max_bytes)
    try:
        (length,) = _LENGTH.unpack_from(raw)
        head = json.loads(raw[_LENGTH.size : _LENGTH.size + length])
        sizes = {Series(str(name), bool(observed)): int(num) for name, observed, num in head}
    except (struct.error, ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError.at("rows", f"the head cannot be read: {error}") from None
    body = raw[_LENGTH.size + length :]
    _check_head(sizes, len(head), len(body))
    whole = from_bytes(out_of_planes(body) if has_planes else body)
    starts = [0, *accumulate(sizes.values())]
    _check(whole, starts)
    return {
        series: part_of(whole, start, end)
        for series, (start, end) in zip(sizes, pairwise(starts), strict=True)
    }


def _check_head(sizes: Mapping[Series, int], num_series: int, num_bytes: int) -> None:
    if len(sizes) != num_series or num_series > MAX_SERIES or min(sizes.values(), default=0) < 0:
        raise InvalidInputError.at("rows", f"at most {MAX_SERIES} series, each once")
    num_rows = sum(sizes.values())
    if num_bytes != num_rows * ROW_BYTES:
        raise InvalidInputError.at("rows", f"{num_bytes} bytes for {num_rows} rows")
    for series in sizes:
        if not is_series_name(series.name):
            raise InvalidInputError.at("rows", f"{series.name[:80]!r} is no name of a series")


def pack_columns(columns: Columns) -> bytes:
    """Return the columns of one series, compressed."""
    return zlib.compress(columns.to_bytes(), _LEVEL)


def unpack_columns(data: bytes, max_rows: int) -> Columns:
    """Undo `pack_columns`. Raises InvalidInputError, also for more than max_rows."""
    raw = _inflated(data, max_rows * ROW_BYTES)
    if len(raw) % ROW_BYTES:
        raise InvalidInputError.at("columns", f"{len(raw)} bytes are no rows of {ROW_BYTES} bytes")
    columns = from_bytes(raw)
    _check(columns, [0])
    return columns


def _inflated(data: bytes, max_bytes: int) -> bytes:
    inflating: Any = zlib.decompressobj()
    try:
        raw: bytes = inflating.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise InvalidInputError.at("rows", f"cannot be decompressed: {error}") from None
    if len(raw) > max_bytes or not inflating.eof:
        raise InvalidInputError.at("rows", f"are cut off, or more than {max_bytes} bytes")
    return raw


def _check(columns: Columns, starts: Sequence[int]) -> None:
    """Raise InvalidInputError unless steps ascend within each series and counts are not negative.
    starts: the index of each series' first row."""
    falls = np.flatnonzero(np.diff(columns.step) <= 0) + 1
    is_first_step = columns.step[[start for start in starts if start < len(columns)]] < 1
    if not set(falls.tolist()) <= set(starts) or is_first_step.any():
        raise InvalidInputError.at("rows", "steps must ascend, from 1 on")
    if len(columns) and min(columns.count.min(), columns.nonfinite.min()) < 0:
        raise InvalidInputError.at("rows", "numbers of values must not be negative")


# ---- Stage actions ----
#
# The work of a pipeline stage in one step, with its times, is stored in the step history.
#
# Each segment reports its last step, in a party of its own beside that of the stage, and a run
# keeps that of its newest segment. Times are seconds since the worker of the stage began the
# step, by its own clock, in whole units of 2^-20 s: that matches their accuracy, and such numbers
# take little room.

PREFIX: Final = "action."
"""The name prefix of all series that report stage actions."""
MAX_ACTIONS: Final = 64
"""The largest number of reported actions per stage. Each has 3 series, which count towards the
party's MAX_SERIES."""
MIN_WAIT_S: Final = 1e-5
"""The shortest wait that is reported; a shorter one is only the time that checking takes."""
NONE: Final = -1
"""The micro-batch number of an action that is done once for all micro-batches."""

_PARTY: Final = "actions"
_UNITS_PER_S: Final = 1 << 20
_VALUE: Final = re.compile(r"action\.([a-z]+)(?:\.(\d{1,9}))?\.(begin_s|end_s|wait_s)")
_SOURCE: Final = re.compile(r"action\.from\.(\d{1,9})")


@dataclass(frozen=True, slots=True)
class StageAction:
    """One piece of work of a pipeline stage in a step, with its times."""

    kind: str
    """One of forward, backward, input and weight (the two halves of a backward pass), exchange (the
    sums over micro-batches, stages and replicas), optimizer."""
    micro_batch: int
    """The number of the micro-batch over all shards of the worker, or NONE."""
    begin_s: float
    end_s: float
    wait_s: float = 0.0
    """The time for which the stage waited before this action for messages of other stages."""


def party_of_stage(stage: int) -> str:
    """Return the name of the sub-party under which the actions of a pipeline stage are reported."""
    return f"{_PARTY}/{stage}"


def is_of_newest_segment(party: str) -> bool:
    """Return whether a party holds the actions of a pipeline stage. Of such parties only the rows
    of the newest segment are kept."""
    return party.rpartition("/")[0].rpartition("/")[2] == _PARTY


def told(actions: Sequence[StageAction]) -> list[StageAction]:
    """Thin out the actions to MAX_ACTIONS: return those of every n-th micro-batch and the last."""
    numbers = sorted({action.micro_batch for action in actions if action.micro_batch != NONE})
    stride = 1
    chosen = set(numbers)
    while sum(action.micro_batch in chosen for action in actions) > MAX_ACTIONS - 2:
        stride *= 2
        chosen = {*numbers[::stride], numbers[-1]}
        if len(chosen) < 3:
            break
    return [entry for entry in actions if entry.micro_batch == NONE or entry.micro_batch in chosen]


@dataclass(frozen=True, slots=True)
class StageReport:
    """The actions of one pipeline stage in one step, with what is needed to align worker clocks."""

    rank: int
    """The rank, in the pipeline, of the worker that has the stage."""
    sources: Sequence[int]
    """The stages from which this stage receives activations, and to which it returns gradients."""
    actions: Sequence[StageAction]
    began_s: float = 0.0
    """The time at which the worker began the step, by the worker's own clock."""
    clock: int = 0
    """The number of the worker's clock, equal for workers that share a clock; 0: unknown."""

    @property
    def values(self) -> dict[str, float]:
        """Return the report as values, keyed by the names of the series that record them."""
        values = {
            f"{PREFIX}rank": float(self.rank),
            f"{PREFIX}began_s": _rounded(self.began_s),
            f"{PREFIX}clock": float(self.clock),
        }
        values |= {f"{PREFIX}from.{stage}": 1.0 for stage in self.sources}
        for action in self.actions:
            number = "" if action.micro_batch == NONE else f".{action.micro_batch}"
            name = f"{PREFIX}{action.kind}{number}"
            values[f"{name}.begin_s"] = _rounded(action.begin_s)
            values[f"{name}.end_s"] = _rounded(action.end_s)
            if action.wait_s >= MIN_WAIT_S:
                values[f"{name}.wait_s"] = _rounded(action.wait_s)
        return values

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Self:
        """Decode a report from values keyed by series name; incomplete actions are left out."""
        by_action: dict[tuple[str, int], dict[str, float]] = {}
        sources: list[int] = []
        for name, value in values.items():
            if its := _VALUE.fullmatch(name):
                key = its[1], NONE if its[2] is None else int(its[2])
                by_action.setdefault(key, {})[its[3]] = value
            elif its := _SOURCE.fullmatch(name):
                sources.append(int(its[1]))
        actions = [
            StageAction(kind, number, times["begin_s"], times["end_s"], times.get("wait_s", 0.0))
            for (kind, number), times in by_action.items()
            if "begin_s" in times and "end_s" in times
        ]
        in_order = sorted(actions, key=lambda action: (action.begin_s, action.end_s))
        rank, began_s, clock = (
            values.get(f"{PREFIX}{name}", 0.0) for name in ("rank", "began_s", "clock")
        )
        return cls(int(rank), sorted(sources), in_order, began_s, int(clock))


def _rounded(seconds: float) -> float:
    return round(seconds * _UNITS_PER_S) / _UNITS_PER_S
