"""Rows of one series as columns, and the ways to merge them.

A row stands for the steps of one bucket: bucket k of stride s covers the steps k*s + 1 to (k +
1)*s. Merging is associative, and a bucket of stride 2s is two of stride s, so the rows depend
neither on how the steps of a run are cut into parts nor on the order of merging.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# ---- Columns ----

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Rows of one series, sorted by step, as one array per column. step: the last step of the row;
    last, min and max: of its finite values, NaN if there are none (-0.0 counts as 0.0 in min and
    max); count and nonfinite: the numbers of values that are finite, and that are not."""

    step: Ints
    last: Floats
    min: Floats
    max: Floats
    count: Ints
    nonfinite: Ints

    def __len__(self) -> int:
        return len(self.step)

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return all columns, in the order in which they are packed."""
        return (self.step, self.last, self.min, self.max, self.count, self.nonfinite)

    def to_bytes(self) -> bytes:
        """Return all columns concatenated as little-endian bytes; equal rows give equal bytes."""
        return b"".join(
            column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
            for column in self.arrays
        )


_NUMBER_BYTES: Final = 8
ROW_BYTES: Final = 6 * _NUMBER_BYTES


def in_planes(data: bytes) -> bytes:
    """Transpose 8-byte numbers into byte planes: all first bytes, then all second ones, and so on.

    The similar bytes of a column (sign and exponent, the high bytes of ints) are then together,
    which makes a compressor several times as fast and its output smaller.
    """
    return np.frombuffer(data, np.uint8).reshape(-1, _NUMBER_BYTES).T.tobytes()


def out_of_planes(data: bytes) -> bytes:
    """Undo `in_planes`. Raises ValueError unless the length is a multiple of 8."""
    return np.frombuffer(data, np.uint8).reshape(_NUMBER_BYTES, -1).T.tobytes()


def from_bytes(data: bytes) -> Columns:
    """Parse the columns that `to_bytes` wrote. Raises ValueError for a wrong length."""
    num_rows, rest = divmod(len(data), ROW_BYTES)
    if rest:
        raise ValueError(f"{len(data)} bytes are no rows of {ROW_BYTES} bytes")

    def column(place: int, kind: str) -> NDArray[Any]:
        return np.frombuffer(data, kind, num_rows, place * num_rows * 8)

    steps, counts, nonfinites = (column(i, "<i8").astype(np.int64, copy=False) for i in (0, 4, 5))
    last, low, high = (column(i, "<f8").astype(np.float64, copy=False) for i in (1, 2, 3))
    return Columns(steps, last, low, high, counts, nonfinites)


EMPTY: Final = from_bytes(b"")


def from_values(steps: Sequence[int], values: Sequence[float]) -> Columns:
    """Return one row for each pair of a step and a value; each row is a bucket of one step."""
    value = np.array(values, np.float64)
    is_finite = np.isfinite(value)
    last = np.where(is_finite, value, np.nan)
    # Either of 0.0 and -0.0 is the minimum: the choice would depend on the cuts.
    bound = last + 0.0
    counts = is_finite.astype(np.int64)
    return Columns(np.array(steps, np.int64), last, bound, bound, counts, 1 - counts)


def concatenated(parts: Sequence[Columns]) -> Columns:
    """Concatenate the rows of all parts without merging any."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return EMPTY
    return Columns(*(np.concatenate(same) for same in zip(*(p.arrays for p in parts), strict=True)))


def part_of(columns: Columns, start: int, end: int) -> Columns:
    """Return the rows with the numbers start to end - 1."""
    return Columns(*(column[start:end] for column in columns.arrays))


def coarsened(columns: Columns, stride: int) -> Columns:
    """Return the rows with all rows in the same bucket of `stride` steps merged into one."""
    if not len(columns):
        return columns
    buckets = (columns.step - 1) // stride
    starts = np.flatnonzero(np.diff(buckets, prepend=buckets[0] - 1))
    if len(starts) == len(columns):
        return columns
    ends = np.append(starts[1:], len(columns)) - 1
    places = np.arange(len(columns))
    newest = np.maximum.reduceat(np.where(columns.count > 0, places, -1), starts)
    has_finite = newest >= starts
    return Columns(
        columns.step[ends],
        np.where(has_finite, columns.last[newest], np.nan),
        np.fmin.reduceat(columns.min, starts),
        np.fmax.reduceat(columns.max, starts),
        np.add.reduceat(columns.count, starts),
        np.add.reduceat(columns.nonfinite, starts),
    )


def joined(parts: Sequence[Columns], stride: int) -> Columns:
    """Concatenate parts with consecutive steps, and merge rows to buckets of `stride` steps."""
    return coarsened(concatenated(parts), stride)


def clipped(columns: Columns, stride: int, from_step: int, to_step: int | None = None) -> Columns:
    """Return the rows whose bucket of `stride` steps contains a step from from_step to to_step."""
    buckets = (columns.step - 1) // stride
    wanted = buckets >= (from_step - 1) // stride
    if to_step is not None:
        wanted &= buckets <= (to_step - 1) // stride
    return columns if wanted.all() else _rows(columns, np.flatnonzero(wanted))


def shortened(columns: Columns, stride: int, max_rows: int) -> tuple[Columns, int]:
    """Double the stride and merge rows until at most max_rows are left; return rows and stride."""
    while len(columns) > max_rows:
        stride *= 2
        columns = coarsened(columns, stride)
    return columns, stride


def _rows(columns: Columns, places: Ints) -> Columns:
    return Columns(*(column[places] for column in columns.arrays))


# ---- Strides ----
#
# A row stands for a power of two steps, so two rows make one of the next stride.

MAX_ROWS: Final = 2048
"""The largest number of rows of a series over all steps of a run."""


def stride_of(num_steps: int) -> int:
    """Return the smallest power of two as stride so that num_steps steps fit in MAX_ROWS rows."""
    stride = 1
    while -(-num_steps // stride) > MAX_ROWS:
        stride *= 2
    return stride
