"""Recording of a segment's steps: one recorder per party and segment, which closes row after row.

`add` is called in every step, so it only keeps the values; many at once are put in rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from stratagem.common.base.printable_text import is_printable
from stratagem.common.history.columns import (
    EMPTY,
    Columns,
    concatenated,
    from_values,
    joined,
    part_of,
)

MAX_SERIES: Final = 256
"""Series of one party; more are not recorded."""
MAX_NAME: Final = 128
"""Characters in the name of a series."""


class Series(NamedTuple):
    """The name of a series, and whether it depends on clocks and machines."""

    name: str
    observed: bool = False


SeriesRows = Mapping[Series, Columns]
"""Rows by series."""

_MAX_PENDING: Final = 2048
"""Calls of `add` after which values are put in rows, where nobody takes any."""


@dataclass(slots=True)
class _SeriesRecorder:
    """The rows of one series so far, and behind them the values that are in none yet."""

    step: int = 0
    """Of the newest value."""
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    rows: Columns = EMPTY
    num_closed: int = 0
    """Rows that get no more values."""
    num_taken: int = 0

    def fold(self, stride: int) -> None:
        """Put the values in rows. The last one stays open: others of its steps may be to come."""
        if self.steps:
            closed = part_of(self.rows, 0, self.num_closed)
            opened = part_of(self.rows, self.num_closed, len(self.rows))
            newer = joined([opened, from_values(self.steps, self.values)], stride)
            self.rows = concatenated([closed, newer])
            self.num_closed = len(self.rows) - 1
            self.steps, self.values = [], []

    def taken(self) -> Columns:
        """Return the rows that were closed since the last call."""
        start, self.num_taken = self.num_taken, self.num_closed
        return part_of(self.rows, start, self.num_closed)


class Recorder:
    """Records values of steps, which come in ascending order. Used by one thread."""

    def __init__(self, stride: int, from_step: int) -> None:
        self.stride: Final = stride
        self.from_step: Final = from_step
        """Steps that had been applied when the recording began."""
        self.dropped: set[str] = set()
        """Names of series that are not recorded, as there are too many or the name is too long."""
        self._series: dict[Series, _SeriesRecorder] = {}
        self._num_pending = 0

    @classmethod
    def going_on(cls, stride: int, from_step: int, rows: SeriesRows) -> "Recorder":
        """Return a recorder that goes on from the rows of another one; see `rows`."""
        recorder = cls(stride, from_step)
        for series, columns in rows.items():
            if len(columns):
                its = _SeriesRecorder(int(columns.step[-1]), rows=columns)
                its.num_closed = len(columns) - 1
                recorder._series[series] = its
        return recorder

    def add(self, step: int, values: Iterable[tuple[Series, float]]) -> None:
        """Record values of a step; of a step that a series has already, nothing."""
        known = self._series
        for series, value in values:
            its = known.get(series) or self._begun(series)
            if its is not None and step > its.step:
                its.step = step
                its.steps.append(step)
                its.values.append(value)
        self._num_pending += 1
        if self._num_pending >= _MAX_PENDING:
            self._fold()

    def _begun(self, series: Series) -> _SeriesRecorder | None:
        if len(self._series) >= MAX_SERIES or not is_series_name(series.name):
            self.dropped.add(series.name)
            return None
        return self._series.setdefault(series, _SeriesRecorder())

    def _fold(self) -> None:
        for its in self._series.values():
            its.fold(self.stride)
        self._num_pending = 0

    def take(self) -> SeriesRows:
        """Return the rows that were closed since the last call."""
        self._fold()
        taken = {series: its.taken() for series, its in self._series.items()}
        return {series: rows for series, rows in taken.items() if len(rows)}

    def rewind(self) -> None:
        """Have the next call of `take` return all rows that are closed, from the first one on."""
        for its in self._series.values():
            its.num_taken = 0

    def end(self) -> SeriesRows:
        """Close the rows that are open and return them, with those closed since the last call."""
        self._fold()
        for its in self._series.values():
            its.num_closed = len(its.rows)
        return self.take()

    def rows(self) -> SeriesRows:
        """Return all rows from the first step on, those of open buckets included: what a member
        that copies this one's state goes on from."""
        self._fold()
        return {series: its.rows for series, its in self._series.items() if len(its.rows)}


def is_series_name(name: str) -> bool:
    """Return whether a series can have this name."""
    return 0 < len(name) <= MAX_NAME and is_printable(name)
