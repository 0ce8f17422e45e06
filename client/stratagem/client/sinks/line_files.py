"""Sinks that write a line per row: CSV and JSON lines, all series of a run in one file.

A value is written with as many digits as give the same number back. `last`, `min` and `max` of a
row are those of the steps that it stands for; of an evaluation they are the same.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

from stratagem.client.sdk.views import Event
from stratagem.client.sinks.contract import Cursor, RowBlock, SinkRun, values_of
from stratagem.client.sinks.growing_file import GrowingFile

COLUMNS: Final = ("party", "series", "step", "last", "min", "max", "count", "nonfinite", "observed")


class _LineFile:
    """A file of lines."""

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
    """A CSV file in long form; what is not finite stands as nan, inf or -inf."""

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
    """A JSON object per row or event; what is not finite stands there as null."""

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
        name: None if isinstance(each, float) and not math.isfinite(each) else each
        for name, each in value.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def _quoted(text: str) -> str:
    """Return a text as a field of CSV (RFC 4180)."""
    if any(each in text for each in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text
