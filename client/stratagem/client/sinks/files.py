"""Write the history of a run to files: CSV, JSON lines, and event files of TensorBoard."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import google_crc32c

from stratagem.client.course.views import Event
from stratagem.client.sinks.sink import Cursor, GrowingFile, RowBlock, SinkRun, values_of

# ---- Line files ----
#
# A line file has one line per row, and all series of a run in one file. A value is written with
# as many digits as give the same number back. `last`, `min` and `max` of a row are those of the
# steps that it stands for; of an evaluation they are the same.

COLUMNS: Final = ("party", "series", "step", "last", "min", "max", "count", "nonfinite", "observed")


class _LineFile:
    """The base class of sinks that append lines to one file."""

    begin: ClassVar[bytes] = b""

    def __init__(self, target: str) -> None:
        self._path = Path(target)
        self._file: GrowingFile | None = None

    def open(self, run: SinkRun) -> Cursor:
        self._file = GrowingFile(self._path, run, self.begin)
        return self._file.cursor

    def restart(self) -> Cursor:
        return self._opened.restart()

    def rows(self, block: RowBlock) -> None:
        self._opened.write("".join(self._lines(block)).encode())

    def fact(self, event: Event) -> None:
        self._opened.write("".join(self._of_event(event)).encode())

    def keep(self, cursor: Cursor) -> None:
        self._opened.keep(cursor)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def _opened(self) -> GrowingFile:
        assert self._file is not None, "open() comes first"
        return self._file

    def _lines(self, block: RowBlock) -> Iterator[str]:
        raise NotImplementedError

    def _of_event(self, event: Event) -> Iterator[str]:
        raise NotImplementedError


class CsvSink(_LineFile):
    """A sink that writes a long-form CSV file; values that are not finite are nan, inf or -inf."""

    begin = (",".join(COLUMNS) + "\n").encode()

    def _lines(self, block: RowBlock) -> Iterator[str]:
        for row in _rows(block):
            values = (_quoted(row[0]), _quoted(row[1]), *map(repr, row[2:8]), str(int(row[8])))
            yield ",".join(values) + "\n"

    def _of_event(self, event: Event) -> Iterator[str]:
        step, values = values_of(event)
        for name, value in values.items():
            finite = int(math.isfinite(value))
            row = (step, value, value, value, finite, 1 - finite)
            yield ",".join(("", _quoted(name), *map(repr, row), "0")) + "\n"


class JsonLinesSink(_LineFile):
    """A sink that writes a JSON object per row or event; values that are not finite are null."""

    def _lines(self, block: RowBlock) -> Iterator[str]:
        for row in _rows(block):
            yield _json(dict(zip(COLUMNS, row, strict=True)))

    def _of_event(self, event: Event) -> Iterator[str]:
        names = ("index", "time_s", "kind", "phase", "sentence")
        values = {name: getattr(event, name) for name in names}
        yield _json({"event": {**values, "payload": event.payload}})


def _rows(block: RowBlock) -> Iterator[tuple[Any, ...]]:
    arrays = (column.tolist() for column in block.columns.arrays)
    for row in zip(*arrays, strict=True):
        yield (block.party, block.series, *row, block.observed)


def _json(value: dict[str, Any]) -> str:
    finite = {
        name: None if isinstance(item, float) and not math.isfinite(item) else item
        for name, item in value.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def _quoted(text: str) -> str:
    """Quote a text as a CSV field (RFC 4180)."""
    if any(mark in text for mark in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


# ---- TensorBoard ----
#
# There is one event file per run.
#
# The file is a sequence of frames (length, its masked CRC-32C, data, its masked CRC-32C) that
# each hold a message `tensorflow.Event`. Only three fields of three messages are needed, and are
# written here: TensorFlow's core/util/event.proto and core/lib/io/record_writer.h. Values in
# TensorBoard have 32 bits.

FILE_VERSION: Final = b"brain.Event:2"
MAX_FLOAT: Final = 3.4028234663852886e38


class TensorBoardSink:
    """A sink that writes TensorBoard event files, in a folder per run. A row is a point at its last
    step; if rows stand for several steps, their minimum and maximum are curves of their own."""

    def __init__(self, target: str) -> None:
        self._root = Path(target)
        self._file: GrowingFile | None = None
        self._wall_s = 0.0

    def open(self, run: SinkRun) -> Cursor:
        self._wall_s = run.submitted_at_s
        name = f"events.out.tfevents.{int(run.submitted_at_s)}.stratagem"
        begin = frame(_event(self._wall_s, 0, _bytes(3, FILE_VERSION)))
        self._file = GrowingFile(self._root / run.run_id / name, run, begin)
        return self._file.cursor

    def restart(self) -> Cursor:
        return self._opened.restart()

    def rows(self, block: RowBlock) -> None:
        curves = [(block.name, block.columns.last)]
        if block.stride > 1:
            low, high = block.columns.min, block.columns.max
            curves += [(f"{block.name}/min", low), (f"{block.name}/max", high)]
        steps = block.columns.step.tolist()
        for tag, values in curves:
            frames = map(self._scalar, steps, [tag] * len(steps), values.tolist())
            self._opened.write(b"".join(frames))

    def fact(self, event: Event) -> None:
        self._wall_s = event.time_s
        step, values = values_of(event)
        for tag, value in values.items():
            self._opened.write(self._scalar(step, tag, value))

    def keep(self, cursor: Cursor) -> None:
        self._opened.keep(cursor)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _scalar(self, step: int, tag: str, value: float) -> bytes:
        is_large = math.isfinite(value) and abs(value) > MAX_FLOAT
        written = math.copysign(math.inf, value) if is_large else value
        of_tag = _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", written)
        return frame(_event(self._wall_s, step, _bytes(5, _bytes(1, of_tag))))

    @property
    def _opened(self) -> GrowingFile:
        assert self._file is not None, "open() comes first"
        return self._file


def frame(data: bytes) -> bytes:
    """Encode data as one record of an event file, with its length and checksums."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _masked_crc(length), data, _masked_crc(data)))


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def _event(wall_s: float, step: int, rest: bytes) -> bytes:
    """Encode a TensorBoard Event: wall_time = 1 (double), step = 2 (int64), and one more field."""
    return b"\x09" + struct.pack("<d", wall_s) + b"\x10" + _varint(step) + rest


def _bytes(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
