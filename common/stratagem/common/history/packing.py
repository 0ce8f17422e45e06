"""Packed rows, as they go over the wire and into the journal's database.

The rows of several series are compressed as one: the length of a JSON head, the head (name, whether
it is observed, and number of rows of each series), the columns, each with the rows of one series
after those of the other. A byte before the compressed ones says that the numbers of the columns
stand in planes; rows that were packed before there were any begin without it. What is unpacked is
checked against a limit before it is allocated, as it may come from anybody.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.history.columns import (
    ROW_BYTES,
    Columns,
    concatenated,
    from_bytes,
    in_planes,
    out_of_planes,
    part_of,
)
from stratagem.common.history.recording import MAX_SERIES, Series, SeriesRows, is_series_name
from stratagem.common.history.strides import MAX_ROWS

MAX_PART_BYTES: Final = 256 * 1024
"""Of one packed part of a recording."""
MAX_UNPACKED_BYTES: Final = MAX_SERIES * (MAX_ROWS + 1) * ROW_BYTES + (1 << 18)
"""All rows of a recording with as many series as there may be, and their names."""

_PART_ROWS: Final = 5000
"""Of one part: as many as are no larger than a part even where nothing can be compressed."""
_LEVEL: Final = 3
"""As small as at a higher level, but for some percent, in half the time."""
_LENGTH: Final = struct.Struct("<I")
_IN_PLANES: Final = b"\x01"
"""No compressed bytes begin with it: those of zlib begin with their method, which is another."""


def pack(rows: SeriesRows) -> bytes:
    """Return the rows of all series, packed; the same rows in the same order give equal bytes."""
    head = [[series.name, series.observed, len(columns)] for series, columns in rows.items()]
    text = json.dumps(head, separators=(",", ":")).encode()
    body = in_planes(concatenated([*rows.values()]).to_bytes())
    return _IN_PLANES + zlib.compress(b"".join([_LENGTH.pack(len(text)), text, body]), _LEVEL)


def packed_parts(rows: SeriesRows) -> Iterator[bytes]:
    """Yield rows as packed parts of at most MAX_PART_BYTES; none where there are no rows."""
    part: dict[Series, Columns] = {}
    room = _PART_ROWS
    for series, columns in rows.items():
        start = 0
        while start < len(columns):
            taken = part_of(columns, start, start + room)
            part[series] = taken
            start, room = start + len(taken), room - len(taken)
            if not room:
                yield pack(part)
                part, room = {}, _PART_ROWS
    if part:
        yield pack(part)


def unpack(data: bytes, max_bytes: int = MAX_UNPACKED_BYTES) -> dict[Series, Columns]:
    """Return what `pack` has packed.

    Raises InvalidInputError, for what is larger than max_bytes before it is decompressed.
    """
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
    """Return what `pack_columns` has packed. Raises InvalidInputError, also for more rows."""
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
    """Refuse rows that no recording has. starts: where the rows of each series begin."""
    falls = np.flatnonzero(np.diff(columns.step) <= 0) + 1
    is_first_step = columns.step[[start for start in starts if start < len(columns)]] < 1
    if not set(falls.tolist()) <= set(starts) or is_first_step.any():
        raise InvalidInputError.at("rows", "steps must ascend, from 1 on")
    if len(columns) and min(columns.count.min(), columns.nonfinite.min()) < 0:
        raise InvalidInputError.at("rows", "numbers of values must not be negative")
