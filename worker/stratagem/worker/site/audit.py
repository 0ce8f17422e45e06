"""The audit file of a site: lines are added at its end, each durably before anything leaves.

The module handles the lock of the file, which several workers of a site may share, a partial line
that a crash has left, and the ε promised to runs by its lines. A line that cannot be written is an
error, and then nothing leaves.
"""

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import BinaryIO, Final

import structlog

from stratagem.common.base.errors import IntegrityError, InvalidInputError
from stratagem.common.base.files import sync_folder
from stratagem.common.identity.audit import GENESIS, MAX_LINE_BYTES, line_of, parsed, torn_record
from stratagem.common.process.failpoints import failpoint
from stratagem.common.schema.json import JSON

log = structlog.get_logger(__name__)

_MODE: Final = 0o600


class AuditFile:
    """An audit file. Used from any thread, and shared with other processes."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises InvalidInputError if it cannot be written, or does not end in a
        line of an audit."""
        self.path = path
        self._lock = Lock()
        self._read_to = 0
        self._epsilon: dict[tuple[str, str], float] = {}  # by data set and run
        self._noises: dict[tuple[str, str], set[str]] = {}  # likewise
        try:
            with self._opened() as file:
                _end_of(file)
        except OSError as error:
            raise InvalidInputError.at("audit.file", f"{path}: {error.strerror}") from None
        except IntegrityError as error:
            raise InvalidInputError.at("audit.file", f"{path}: {error}") from None

    def add(self, record: Mapping[str, JSON]) -> None:
        """Append a line durably. If it raises OSError or IntegrityError, the line was not added."""
        with self._lock, self._opened() as file:
            previous, fragment = _end_of(file)
            if fragment:
                log.warning("the audit ended in a line that a crash had cut off", file=self.path)
                file.truncate(file.seek(-len(fragment), os.SEEK_END))
                line = line_of(torn_record(fragment), previous)
                file.write(line)
                previous = parsed(line[:-1])["hash"]
            line = line_of(record, previous)
            if len(line) > MAX_LINE_BYTES:
                raise IntegrityError(f"a line of the audit has {len(line)} bytes")
            failpoint("worker.audit.before_line")
            half = len(line) // 2
            file.write(line[:half])
            file.flush()
            failpoint("worker.audit.within_line")
            file.write(line[half:])
            file.flush()
            os.fsync(file.fileno())
        failpoint("worker.audit.after_line")

    def spent(self, run_id: str) -> Mapping[str, float]:
        """Return the ε promised to all other runs, keyed by data set."""
        with self._lock:
            self._read_on()
            totals: dict[str, float] = {}
            for (data, of_run), epsilon in sorted(self._epsilon.items()):
                if of_run != run_id:
                    totals[data] = totals.get(data, 0.0) + epsilon
            return totals

    def noises(self, run_id: str, data: str) -> frozenset[str]:
        """Return the names of the noise in a run's rounds with protected rows of a data set.

        There is one name per round that has left, however often the round was repeated.
        """
        with self._lock:
            self._read_on()
            return frozenset(self._noises.get((data, run_id), ()))

    def _read_on(self) -> None:
        with self._opened() as file:
            file.seek(self._read_to)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self._read_to += len(raw)
                try:
                    record = parsed(raw[:-1])
                except IntegrityError:  # left by a crash; `audit verify` distinguishes them
                    continue
                if record.get("kind") == "round" and record.get("epsilon") is not None:
                    key = (record["data"], record["run"])
                    self._epsilon[key] = max(self._epsilon.get(key, 0.0), record["epsilon"])
                if record.get("kind") == "round" and record.get("noise"):
                    self._noises.setdefault((record["data"], record["run"]), set()).add(
                        record["noise"]
                    )

    def _opened(self) -> BinaryIO:
        """Open and lock the file; closing it unlocks it."""
        is_new = not self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        file = os.fdopen(descriptor, "r+b")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_new:
            sync_folder(self.path.parent)
        return file


def _end_of(file: BinaryIO) -> tuple[str, bytes]:
    """Return (hash of the last whole line, partial line after it), and seek to the file's end.
    Raises IntegrityError if there is no whole line."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 2 * MAX_LINE_BYTES))
    lines = file.read().split(b"\n")
    fragment = lines.pop()
    file.seek(0, os.SEEK_END)
    if not lines:
        if size > MAX_LINE_BYTES:
            raise IntegrityError("it is no audit: it has no lines")
        return GENESIS, fragment
    try:
        return parsed(lines[-1])["hash"], fragment
    except IntegrityError as error:
        reason = f"its last line: {error}; move the file away, and keep it"
        raise IntegrityError(reason) from None
