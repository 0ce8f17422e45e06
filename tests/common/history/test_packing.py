"""Packed rows: they come back as they were, and nothing larger than its limit is unpacked."""

import json
import math
import struct
import zlib
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.history import Columns, Recorder, Series, joined
from stratagem.common.history.recording import (
    MAX_PART_BYTES,
    SeriesRows,
    pack,
    pack_columns,
    packed_parts,
    unpack,
    unpack_columns,
)

LOSS, WALL = Series("train.loss"), Series("time.wall_s", observed=True)


def rows(num_steps: int, num_series: int = 0) -> SeriesRows:
    recorder = Recorder(1, 0)
    noise = np.random.default_rng(3).random((num_steps, num_series + 1))
    more = [Series(f"train.m{i}") for i in range(num_series)]
    for step in range(1, num_steps + 1):
        value = math.nan if step % 10 == 0 else float(noise[step - 1, -1])
        recorder.add(step, [(LOSS, value), (WALL, step * 0.5)])
        recorder.add(step, zip(more, noise[step - 1].tolist(), strict=False))
    return recorder.end()


def same(one: SeriesRows, other: SeriesRows) -> bool:
    return list(one) == list(other) and all(
        columns.to_bytes() == other[series].to_bytes() for series, columns in one.items()
    )


def test_rows_come_back_as_they_were_within_their_limit() -> None:
    packed = rows(50)
    assert same(packed, unpack(pack(packed)))
    assert [series.observed for series in unpack(pack(packed))] == [False, True]
    assert same({}, unpack(pack({})))
    columns = packed[LOSS]
    assert unpack_columns(pack_columns(columns), 50).to_bytes() == columns.to_bytes()
    columns = rows(50)[LOSS]
    with pytest.raises(InvalidInputError, match="more than"):
        unpack_columns(pack_columns(columns), 49)
    with pytest.raises(InvalidInputError, match="no rows"):
        unpack_columns(zlib.compress(bytes(47)), 50)


def test_parts_are_small_and_make_the_whole() -> None:
    whole = rows(2000, 8)
    parts = list(packed_parts(whole))
    assert len(parts) > 2
    assert max(map(len, parts)) <= MAX_PART_BYTES
    collected: dict[Series, list[Columns]] = {}
    for part in parts:
        for series, columns in unpack(part).items():
            collected.setdefault(series, []).append(columns)
    assert same(whole, {series: joined(pieces, 1) for series, pieces in collected.items()})
    assert not list(packed_parts({}))


def test_rows_that_were_packed_before_they_stood_in_planes_are_read() -> None:
    older = head(["train.loss", False, 2], ["time.wall_s", True, 1], body=in_columns(3, 5, 5))
    rows = unpack(older)
    assert [series.observed for series in rows] == [False, True]
    assert [columns.step.tolist() for columns in rows.values()] == [[3, 5], [5]]
    assert same(rows, unpack(pack(rows)))


def in_columns(*steps: int) -> bytes:
    num = len(steps)
    return struct.pack(f"<{num}q{3 * num}d{2 * num}q", *steps, *[0.5] * 3 * num, *[1] * 2 * num)


def head(*series: object, body: bytes = b"") -> bytes:
    text = json.dumps(series).encode()
    return zlib.compress(struct.pack("<I", len(text)) + text + body)


@cache
def bomb() -> bytes:
    return zlib.compress(bytes(1 << 25))


def row(step: int, count: int = 1) -> bytes:
    return struct.pack("<qdddqq", step, 0.0, 0.0, 0.0, count, 0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: b"no zlib", "cannot be decompressed"),
        (lambda: pack(rows(50))[:-5], "are cut off"),
        (lambda: b"\x01", "are cut off"),
        (lambda: b"\x01" + bomb(), "more than"),
        (lambda: b"\x01" + head(["a", False, 1], body=bytes(47)), "bytes for 1 rows"),
        (lambda: bomb(), "more than"),
        (lambda: zlib.compress(b"ab"), "head cannot be read"),
        (lambda: head(["a", False]), "head cannot be read"),
        (lambda: head(["a", False, 1]), "0 bytes for 1 rows"),
        (lambda: head(["a", False, 10**12]), "bytes for"),
        (lambda: head(["a", False, 1], ["b", False, -1]), "at most 256 series"),
        (lambda: head(["a", False, 0], ["a", False, 0]), "each once"),
        (lambda: head(*([f"m{i}", False, 0] for i in range(257))), "at most 256 series"),
        (lambda: head(["\x1b[2J", False, 0]), "no name of a series"),
        (lambda: head(["a", False, 1], body=row(0)), "must ascend"),
        (lambda: head(["a", False, 1], body=row(1, -1)), "must not be negative"),
    ],
)
def test_what_is_no_packed_rows_is_refused(make: Callable[[], bytes], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        unpack(make())
