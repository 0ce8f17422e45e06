"""Packed rows, as they go over the wire and into the journal's database.

The rows of several series are compressed as one: the length of a JSON head, the head (name, whether
it is observed, and number of rows of each series), and the columns of each. What is unpacked is
checked against a limit before it is allocated, as it may come from anybody.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.history.columns import ROW_BYTES, Columns, from_bytes
from stratagem.common.history.recording import MAX_SERIES, Series, SeriesRows, is_series_name
from stratagem.common.history.strides import MAX_ROWS

MAX_PART_BYTES: Final = 256 * 1024
"""Of one packed part of a recording."""
MAX_UNPACKED_BYTES: Final = MAX_SERIES * (MAX_ROWS + 1) * ROW_BYTES + (1 << 18)
"""All rows of a recording with as many series as there may be, and their names."""

_PART_ROWS: Final = 5000
"""Of one part: as many as are no larger than a part even where nothing can be compressed."""
_LEVEL: Final = 6
_LENGTH: Final = struct.Struct("<I")


def pack(rows: SeriesRows) -> bytes:
    """Return the rows of all series, packed; the same rows in the same order give equal bytes."""
    head = [[series.name, series.observed, len(columns)] for series, columns in rows.items()]
    text = json.dumps(head, separators=(",", ":")).encode()
    bodies = (columns.to_bytes() for columns in rows.values())
    return zlib.compress(b"".join([_LENGTH.pack(len(text)), text, *bodies]), _LEVEL)


def packed_parts(rows: SeriesRows) -> Iterator[bytes]:
    """Yield rows as packed parts of at most MAX_PART_BYTES; none where there are no rows."""
    part: dict[Series, Columns] = {}
    room = _PART_ROWS
    for series, columns in rows.items():
        start = 0
        while start < len(columns):
            taken = Columns(*(column[start : start + room] for column in columns.arrays))
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
    raw = _inflated(data, max_bytes)
    try:
        (length,) = _LENGTH.unpack_from(raw)
        head = json.loads(raw[_LENGTH.size : _LENGTH.size + length])
        sizes = {Series(str(name), bool(observed)): int(num) for name, observed, num in head}
    except (struct.error, ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError.at("rows", f"the head cannot be read: {error}") from None
    place = _LENGTH.size + length
    num_rows = sum(sizes.values())
    if len(sizes) != len(head) or len(sizes) > MAX_SERIES or min(sizes.values(), default=0) < 0:
        raise InvalidInputError.at("rows", f"at most {MAX_SERIES} series, each once")
    if len(raw) - place != num_rows * ROW_BYTES:
        raise InvalidInputError.at("rows", f"{len(raw) - place} bytes for {num_rows} rows")
    unpacked: dict[Series, Columns] = {}
    for series, num in sizes.items():
        if not is_series_name(series.name):
            raise InvalidInputError.at("rows", f"{series.name[:80]!r} is no name of a series")
        end = place + num * ROW_BYTES
        unpacked[series] = _checked(from_bytes(raw[place:end]))
        place = end
    return unpacked


def pack_columns(columns: Columns) -> bytes:
    """Return the columns of one series, compressed."""
    return zlib.compress(columns.to_bytes(), _LEVEL)


def unpack_columns(data: bytes, max_rows: int) -> Columns:
    """Return what `pack_columns` has packed. Raises InvalidInputError, also for more rows."""
    raw = _inflated(data, max_rows * ROW_BYTES)
    if len(raw) % ROW_BYTES:
        raise InvalidInputError.at("columns", f"{len(raw)} bytes are no rows of {ROW_BYTES} bytes")
    return _checked(from_bytes(raw))


def _inflated(data: bytes, max_bytes: int) -> bytes:
    inflating: Any = zlib.decompressobj()
    try:
        raw: bytes = inflating.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise InvalidInputError.at("rows", f"cannot be decompressed: {error}") from None
    if len(raw) > max_bytes or not inflating.eof:
        raise InvalidInputError.at("rows", f"are cut off, or more than {max_bytes} bytes")
    return raw


def _checked(columns: Columns) -> Columns:
    steps = columns.step
    if len(steps) and (steps[0] < 1 or bool(np.any(np.diff(steps) <= 0))):
        raise InvalidInputError.at("rows", "steps must ascend, from 1 on")
    if bool(np.any(columns.count < 0)) or bool(np.any(columns.nonfinite < 0)):
        raise InvalidInputError.at("rows", "numbers of values must not be negative")
    return columns
