"""A file that only grows, and is cut back to what its cursor says when it is opened again."""

import os
from pathlib import Path
from typing import BinaryIO

from stratagem.client.sinks.contract import Cursor, SinkRun
from stratagem.client.sinks.cursor_file import cursor_path, read_cursor, write_cursor
from stratagem.common.base.errors import InvalidInputError


class GrowingFile:
    """The target of one run. What is in the file and not behind its cursor is whole."""

    def __init__(self, path: Path, run: SinkRun, begin: bytes = b"") -> None:
        """begin: what every file begins with. Raises InvalidInputError for a file of others."""
        self._path, self._begin = path, begin
        self._cursor_path = cursor_path(path, run.run_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.cursor = read_cursor(self._cursor_path) or Cursor()
        size = path.stat().st_size if path.exists() else 0
        if size and not self._cursor_path.exists():
            text = f"{str(path)!r} exists and is not of run {run.run_id}; name another file"
            raise InvalidInputError.at("target", text)
        if size < self.cursor.size:  # somebody has cut or removed it: all is written anew
            self.cursor = Cursor()
        write_cursor(self._cursor_path, self.cursor)
        self._file: BinaryIO = path.open("ab")
        self._file.truncate(self.cursor.size)
        if not self.cursor.size:
            self.write(begin)

    def restart(self) -> Cursor:
        """Begin anew; returns the cursor of an empty file."""
        self.cursor = Cursor()
        write_cursor(self._cursor_path, self.cursor)
        self._file.truncate(0)
        self.write(self._begin)
        return self.cursor

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def keep(self, cursor: Cursor) -> None:
        """Flush, then keep the cursor with the size that the file has now."""
        self._file.flush()
        os.fsync(self._file.fileno())
        size = os.fstat(self._file.fileno()).st_size
        self.cursor = Cursor(cursor.event_index, cursor.steps, size)
        write_cursor(self._cursor_path, self.cursor)

    def close(self) -> None:
        """What is not behind the cursor yet is cut when the file is opened again."""
        self._file.close()
