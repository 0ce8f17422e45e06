"""The SQLite database of a journal: connections, pragmas, translation of errors.

WAL with synchronous=FULL: a commit is one fsync of the log, and survives a power cut. Writers begin
IMMEDIATE, so that a transaction waits at its start and never fails half-way for a lock.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import URL, Connection, Engine, Float, create_engine, event, literal_column
from sqlalchemy.exc import DatabaseError, OperationalError

from stratagem.common.base.errors import IntegrityError, UnavailableError
from stratagem.coordinator.store.database import Database, GoneError

_BUSY_TIMEOUT_S: Final = 5.0
_PATIENCE_S: Final = 30.0
"""Seconds to wait until the file is unlocked, or the disk has room. Meanwhile heartbeats are
answered and workers train on; what has to be journaled waits."""
_PASSING: Final = frozenset({"SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL"})
_DAMAGE: Final = frozenset({"SQLITE_CORRUPT", "SQLITE_NOTADB"})


def open_sqlite(path: Path) -> Database:
    """Return the database in a file that is made if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The journal holds whole job files, so it is for its owner alone.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    file = os.fstat(descriptor).st_ino
    os.close(descriptor)
    _sync_folder(path)
    return Database(
        writer=_engine(path, "BEGIN IMMEDIATE", file),
        reader=_engine(path, "BEGIN", file),
        translated=_translated,
        now_s=literal_column("(julianday('now') - 2440587.5) * 86400.0", Float(53)),
        silent_s=None,  # this is the clock of the host, which people and NTP set
        patience_s=_PATIENCE_S,
        migration_lock="",
    )


def _sync_folder(path: Path) -> None:
    """Make the file's own entry in its folder durable."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _translated() -> Iterator[None]:
    """Raise errors of the database as errors of this project; broken constraints pass unchanged."""
    try:
        yield
    except OperationalError as error:
        name = getattr(error.orig, "sqlite_errorname", "")
        passes = any(name.startswith(prefix) for prefix in _PASSING)
        kind = UnavailableError if passes else GoneError
        raise kind(f"the journal cannot be used now: {error.orig}") from error
    except DatabaseError as error:
        if getattr(error.orig, "sqlite_errorname", "") in _DAMAGE:
            raise IntegrityError(f"the journal is damaged: {error.orig}") from error
        raise


def _engine(path: Path, begin: str, file: int) -> Engine:
    # The owner may open the journal in one thread and use it in another, but never in two at once.
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"check_same_thread": False, "timeout": _BUSY_TIMEOUT_S},
        pool_size=1,
        max_overflow=0,
    )

    @event.listens_for(engine, "connect")
    def set_up(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        if _inode(path) != file:  # SQLite would write on into a file that has no name any more
            raise GoneError(f"the journal cannot be used now: {path} was removed or replaced")
        connection.exec_driver_sql(begin)

    return engine


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
