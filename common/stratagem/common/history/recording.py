"""Recording of a segment's steps: one recorder per party and segment, which closes row after row.

`add` is called in every step: a bucket that is open is five numbers, and a closed one a tuple.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from stratagem.common.base.printable_text import is_printable
from stratagem.common.history.columns import Columns

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

_ROW: Final = 6
"""Numbers of a row: step, last, min, max, count, nonfinite; see Columns."""


def _columns_of(rows: Sequence[float]) -> Columns:
    """Return rows that stand one after the other as columns."""
    columns = np.array(rows, np.float64).reshape(-1, _ROW).T
    steps, counts, nonfinites = (columns[place].astype(np.int64) for place in (0, 4, 5))
    lasts, lows, highs = (columns[place].copy() for place in (1, 2, 3))
    return Columns(steps, lasts, lows, highs, counts, nonfinites)


def _rows_of(columns: Columns) -> list[float]:
    rows: list[float] = np.stack(columns.arrays, axis=1).ravel().tolist()
    return rows


@dataclass(slots=True)
class _SeriesRecorder:
    """The rows of one series so far, and the bucket that is open."""

    bucket: int = -1
    step: int = 0
    last: float = math.nan
    low: float = math.inf
    high: float = -math.inf
    count: int = 0
    nonfinite: int = 0
    rows: list[float] = field(default_factory=list)
    """One after the other in one list: a tuple for each would keep the garbage collector busy."""
    num_taken: int = 0
    """Of the numbers in `rows`."""

    @property
    def open_row(self) -> Sequence[float]:
        """The row of the open bucket, if there is one."""
        if self.bucket < 0:
            return ()
        if self.count:
            return (self.step, self.last, self.low, self.high, self.count, self.nonfinite)
        return (self.step, math.nan, math.nan, math.nan, 0, self.nonfinite)

    def close(self) -> None:
        """Close the open bucket, if there is one."""
        if self.bucket >= 0:
            self.rows += self.open_row
            self.begin(-1)

    def begin(self, bucket: int) -> None:
        """Open a bucket without values."""
        self.bucket, self.last = bucket, math.nan
        self.low, self.high = math.inf, -math.inf
        self.count = self.nonfinite = 0

    def reopen(self, stride: int) -> None:
        """Open the last bucket again: others of its steps may be to come."""
        step, last, low, high, count, nonfinite = self.rows[-_ROW:]
        del self.rows[-_ROW:]
        self.step, self.bucket = int(step), (int(step) - 1) // stride
        self.last, self.count, self.nonfinite = last, int(count), int(nonfinite)
        if count:
            self.low, self.high = low, high


class Recorder:
    """Records values of steps, which come in ascending order. Used by one thread."""

    def __init__(self, stride: int, from_step: int) -> None:
        self.stride: Final = stride
        self.from_step: Final = from_step
        """Steps that had been applied when the recording began."""
        self.dropped: set[str] = set()
        """Names of series that are not recorded, as there are too many or the name is too long."""
        self._series: dict[Series, _SeriesRecorder] = {}

    @classmethod
    def going_on(cls, stride: int, from_step: int, rows: SeriesRows) -> "Recorder":
        """Return a recorder that goes on from the rows of another one; see `rows`."""
        recorder = cls(stride, from_step)
        for series, columns in rows.items():
            if len(columns):
                recorder._series[series] = _SeriesRecorder(rows=_rows_of(columns))
                recorder._series[series].reopen(stride)
        return recorder

    def add(self, step: int, values: Iterable[tuple[Series, float]]) -> None:
        """Record values of a step; of a step that a series has already, nothing."""
        bucket = (step - 1) // self.stride
        for series, value in values:
            its = self._series.get(series) or self._begun(series)
            if its is None or step <= its.step:
                continue
            if its.bucket != bucket:
                its.rows += its.open_row
                its.begin(bucket)
            its.step = step
            if value - value == 0.0:  # neither infinite nor NaN
                its.last = value
                its.count += 1
                if value < its.low:
                    its.low = value
                if value > its.high:
                    its.high = value
            else:
                its.nonfinite += 1

    def _begun(self, series: Series) -> _SeriesRecorder | None:
        if len(self._series) >= MAX_SERIES or not is_series_name(series.name):
            self.dropped.add(series.name)
            return None
        return self._series.setdefault(series, _SeriesRecorder())

    def take(self) -> SeriesRows:
        """Return the rows that were closed since the last call."""
        taken = {}
        for series, its in self._series.items():
            if len(its.rows) > its.num_taken:
                taken[series] = _columns_of(its.rows[its.num_taken :])
                its.num_taken = len(its.rows)
        return taken

    def rewind(self) -> None:
        """Have the next call of `take` return all rows that are closed, from the first one on."""
        for its in self._series.values():
            its.num_taken = 0

    def end(self) -> SeriesRows:
        """Close the rows that are open and return them, with those closed since the last call."""
        for its in self._series.values():
            its.close()
        return self.take()

    def rows(self) -> SeriesRows:
        """Return all rows from the first step on, those of open buckets included: what a member
        that copies this one's state goes on from."""
        all_rows = {series: [*its.rows, *its.open_row] for series, its in self._series.items()}
        return {series: _columns_of(rows) for series, rows in all_rows.items() if rows}


def is_series_name(name: str) -> bool:
    """Return whether a series can have this name."""
    return 0 < len(name) <= MAX_NAME and is_printable(name)
