"""A snapshot of a journal as a SQLite file, and the restoring of a journal from such a file.

The snapshot is a read-only transaction on a connection of its own: the leader writes on meanwhile.
Whatever the journal's database is, its copy is a SQLite file of the same tables, and can be
restored into either database.
"""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from sqlalchemy import Connection, Table, delete, func, insert, select, text, update

from stratagem.common.base.errors import ConflictError, IntegrityError
from stratagem.coordinator.store.database import Database, open_sqlite
from stratagem.coordinator.store.schema import (
    IDENTITY,
    event,
    history,
    lease,
    meta,
    migrate,
    summary,
)

TERMS_AHEAD: Final = 1_000_000
"""The number added to the term of a restored journal, since workers and objects in a bucket have
seen terms from after the backup."""
_BATCH_ROWS: Final = 2000
_COPIED: Final = (event, summary, history, meta)


@dataclass(frozen=True, slots=True)
class Known:
    """The term and the journal identifier in a snapshot's file."""

    term: int
    """The term that led when the snapshot was taken."""
    identity: str
    """The identifier of the journal; "" if it had none yet."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read both from a snapshot's file. Raises IntegrityError if it is not an undamaged
        journal."""
        file = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            (sound,) = file.execute("PRAGMA integrity_check(1)").fetchone()
            if sound != "ok":
                raise IntegrityError(f"{path} is damaged: {sound}")
            (term,) = file.execute("SELECT term FROM lease").fetchone()
            identity = file.execute("SELECT value FROM meta WHERE key = ?", (IDENTITY,)).fetchone()
            return cls(term, identity[0] if identity else "")
        except sqlite3.DatabaseError as error:
            raise IntegrityError(f"{path} is no journal, or a damaged one: {error}") from error
        finally:
            file.close()


class Snapshot:
    """A consistent view of a journal at one moment, until closed. Not thread-safe."""

    def __init__(self, database: Database) -> None:
        """Begin the snapshot; it owns the database's connections."""
        self._database = database
        with database.translated():
            self._connection = database.reader.connect()
            self._is_sqlite = self._connection.dialect.name == "sqlite"
            if not self._is_sqlite:
                self._connection.execution_options(isolation_level="REPEATABLE READ")
                for limit in ("idle_in_transaction_session_timeout", "statement_timeout"):
                    self._connection.execute(text(f"SET LOCAL {limit} = 0"))
            self.term: int = self._connection.execute(select(lease.c.term)).scalar_one()
            """The term that led when the snapshot was taken."""

    def write(self, path: Path) -> None:
        """Write the journal as of the snapshot to a new, private file, without a leader."""
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with self._database.translated():
            if self._is_sqlite:
                self._copy_pages(path)
            else:
                self._copy_rows(path)
        released = sqlite3.connect(path)
        try:
            with released:
                released.execute("UPDATE lease SET holder = ''")
            released.execute("PRAGMA journal_mode=DELETE")  # no file beside it
        finally:
            released.close()

    def close(self) -> None:
        """End the snapshot, and close its connections."""
        self._connection.close()
        self._database.close()

    def _copy_pages(self, path: Path) -> None:
        source: Any = self._connection.connection.driver_connection
        target = sqlite3.connect(path)
        try:
            source.backup(target)
        finally:
            target.close()

    def _copy_rows(self, path: Path) -> None:
        target = open_sqlite(path)
        try:
            migrate(target)
            with target.write() as connection:
                copy(self._connection, connection, self.term)
        finally:
            target.close()


def copy(source: Connection, target: Connection, term: int) -> None:
    """Copy a whole journal into one without events; the copy gets this term and no leader. Raises
    ConflictError if the target has events."""
    if target.execute(select(func.count()).select_from(event)).scalar():
        raise ConflictError("there is a journal with events already; nothing was written")
    target.execute(delete(meta))
    for table in _COPIED:
        for rows in _rows(source, table):
            target.execute(insert(table), rows)
    target.execute(update(lease).values(holder="", term=term, renewals=0, renewed_s=0))
    if target.dialect.name != "sqlite":  # rows with numbers of their own have not moved it
        newest = "SELECT coalesce(max(position), 0) + 1 FROM event"
        place = "pg_get_serial_sequence('event', 'position')"
        target.execute(text(f"SELECT setval({place}, ({newest}), false)"))


def restore(path: Path, target: Database) -> int:
    """Restore a snapshot's file into a journal without events, all or nothing; return the new term,
    greater than all earlier ones.

    The file's tables are migrated to the present revision first.
    """
    file = open_sqlite(path)
    try:
        migrate(file)
        with file.read() as source:
            term: int = source.execute(select(lease.c.term)).scalar_one()
            with target.write() as connection:
                copy(source, connection, term + TERMS_AHEAD)
        return term + TERMS_AHEAD
    finally:
        file.close()


def _rows(source: Connection, table: Table) -> Iterator[Sequence[dict[str, Any]]]:
    asked = source.execute(select(table), execution_options={"yield_per": _BATCH_ROWS})
    for rows in asked.mappings().partitions():
        yield [dict(row) for row in rows]
