"""The database of a journal, SQLite or PostgreSQL: transactions, clock, errors, and waiting for a
lost database."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    Float,
    create_engine,
    event,
    literal_column,
    make_url,
)
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DBAPIError,
    InterfaceError,
    OperationalError,
)

from stratagem.common.base.errors import IntegrityError, InvalidInputError, UnavailableError
from stratagem.common.base.files import sync_folder

# ---- Interface ----

_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 1.0

T = TypeVar("T")


class GoneError(UnavailableError):
    """The database cannot be used, and will not come back by itself: waiting does not help."""


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Database:
    """The connections to one database, with its dialect-specific settings. Not thread-safe."""

    writer: Engine
    """The engine whose transactions may write."""
    reader: Engine
    translated: Callable[[], AbstractContextManager[None]]
    """Returns a context manager that converts the driver's errors to errors of this project."""
    now_s: ColumnElement[float]
    """The current time by the database's own clock, in seconds since 1970."""
    silent_s: ColumnElement[float] | None
    """The seconds since the lease was renewed, by that clock; None if the clock is not reliable."""
    patience_s: float
    """The seconds to wait for a database that does not answer."""
    migration_lock: str
    """The SQL statement that makes processes migrate the schema one at a time; "" if every write
    transaction excludes all others."""

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Context manager for a transaction: committed at the end, or rolled back on an error."""
        with self.translated(), self.writer.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Context manager that opens a read-only transaction."""
        with self.translated(), self.reader.begin() as connection:
            yield connection

    def persist(self, act: Callable[[bool], T]) -> T:
        """Run a transaction, retrying while the database is away, for at most patience_s.

        `act` is passed True on a retry: the earlier attempt may have been committed, and only its
        answer lost.
        """
        give_up_s = time.monotonic() + self.patience_s
        pause_s, is_repeat = _FIRST_PAUSE_S, False
        while True:
            try:
                return act(is_repeat)
            except UnavailableError as error:
                if isinstance(error, GoneError) or time.monotonic() >= give_up_s:
                    raise
                if not is_repeat:
                    log.warning("waiting for the journal's database", reason=str(error))
            is_repeat = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)

    def close(self) -> None:
        """Close the connections."""
        self.writer.dispose()
        self.reader.dispose()


# ---- SQLite ----
#
# WAL with synchronous=FULL: a commit is one fsync of the log, and survives a power cut. Writers
# begin IMMEDIATE, so that a transaction waits at its start and never fails half-way for a lock.

_BUSY_TIMEOUT_S: Final = 5.0
_SQLITE_PATIENCE_S: Final = 30.0
"""The seconds to wait while the file is locked or the disk full. Heartbeats are answered meanwhile
and workers train on; only journaling waits."""
_PASSING: Final = frozenset({"SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_FULL"})
_SQLITE_DAMAGE: Final = frozenset({"SQLITE_CORRUPT", "SQLITE_NOTADB"})


def open_sqlite(path: Path) -> Database:
    """Open the database in a file, which is made if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The journal holds whole job files, so it is for its owner alone.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    file = os.fstat(descriptor).st_ino
    os.close(descriptor)
    sync_folder(path.parent)
    return Database(
        writer=_sqlite_engine(path, "BEGIN IMMEDIATE", file),
        reader=_sqlite_engine(path, "BEGIN", file),
        translated=_sqlite_errors,
        now_s=literal_column("(julianday('now') - 2440587.5) * 86400.0", Float(53)),
        silent_s=None,  # this is the clock of the host, which people and NTP set
        patience_s=_SQLITE_PATIENCE_S,
        migration_lock="",
    )


@contextmanager
def _sqlite_errors() -> Iterator[None]:
    """Context manager that converts SQLite errors to ours, except broken constraints."""
    try:
        yield
    except OperationalError as error:
        name = getattr(error.orig, "sqlite_errorname", "")
        passes = any(name.startswith(prefix) for prefix in _PASSING)
        kind = UnavailableError if passes else GoneError
        raise kind(f"the journal cannot be used now: {error.orig}") from error
    except DatabaseError as error:
        if getattr(error.orig, "sqlite_errorname", "") in _SQLITE_DAMAGE:
            raise IntegrityError(f"the journal is damaged: {error.orig}") from error
        raise


def _sqlite_engine(path: Path, begin: str, file: int) -> Engine:
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


# ---- PostgreSQL ----
#
# A leader that is frozen or cut off inside a transaction holds the lock of the lease; the server
# ends such a transaction after _IDLE_S, so that the next leader is not held up. This needs the
# extra `postgres` (psycopg 3). Sessions are set up with SET: a pooler in between must keep them
# (session pooling).

SCHEME: Final = "postgresql"

_POSTGRES_PATIENCE_S: Final = 60.0
_IDLE_S: Final = 3
_SESSION: Final = (
    f"SET idle_in_transaction_session_timeout = '{_IDLE_S}s'",
    "SET lock_timeout = '5s'",
    "SET statement_timeout = '30s'",
    # A commit that was acknowledged is on the disk; what is even stricter is left as it is.
    "SELECT set_config('synchronous_commit', 'on', false)"
    " WHERE current_setting('synchronous_commit') <> 'remote_apply'",
)
_CONNECT: Final[Mapping[str, str]] = {
    # libpq's words; a host that has vanished is noticed in about 10 s.
    "connect_timeout": "5",
    # Of a database in SQL_ASCII, text would else come as bytes.
    "client_encoding": "utf8",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "application_name": "stratagem-coordinator",
}
_READ_ONLY: Final = "25006"
"""The SQLSTATE of a write to a read-only standby, as seen during a failover."""
_POSTGRES_DAMAGE: Final = frozenset({"XX001", "XX002"})
_MIGRATION: Final = 7_372_615_108_291_533_173  # a number of our own among all advisory locks


def open_postgres(url: str, password_file: Path | None) -> Database:
    """Open the database at postgresql://[user@]host[:port]/database[?libpq parameters]."""
    parsed = _checked(url)
    silent_s = (
        "extract(epoch FROM clock_timestamp())::float8 - greatest(lease.renewed_s,"
        " extract(epoch FROM pg_postmaster_start_time())::float8)"
    )
    return Database(
        writer=_postgres_engine(parsed, password_file),
        reader=_postgres_engine(parsed, password_file),
        translated=_postgres_errors,
        now_s=literal_column("extract(epoch FROM clock_timestamp())::float8", Float(53)),
        # A leader that could not renew because the server was down was not silent.
        silent_s=literal_column(silent_s, Float(53)),
        patience_s=_POSTGRES_PATIENCE_S,
        migration_lock=f"SELECT pg_advisory_xact_lock({_MIGRATION})",
    )


def _checked(url: str) -> URL:
    """Check the URL and return it for psycopg. Errors never quote it: it may hold a password."""
    if find_spec("psycopg") is None:
        raise InvalidInputError.at(
            "journal", "PostgreSQL needs psycopg: pip install 'stratagem[postgres]'"
        )
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InvalidInputError.at(
            "journal", "is not postgresql://[user@]host[:port]/database"
        ) from None
    if parsed.password is not None or "password" in parsed.query:
        raise InvalidInputError.at(
            "journal",
            "a password in the URL would be seen by everybody on this machine; "
            "use journal_password_file, or PGPASSFILE",
        )
    return parsed.set(drivername=f"{SCHEME}+psycopg")


def _postgres_engine(url: URL, password_file: Path | None) -> Engine:
    defaults = {name: value for name, value in _CONNECT.items() if name not in url.query}
    # The default isolation, READ COMMITTED, sees what was committed before a lock was had.
    engine = create_engine(url, connect_args=defaults, pool_size=1, max_overflow=0)

    @event.listens_for(engine, "do_connect")
    def add_password(_dialect: object, _record: object, _arguments: object, named: Any) -> None:
        if password_file is not None:  # read again for every connection: it may change
            named["password"] = _password(password_file)

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            for statement in _SESSION:
                cursor.execute(statement)
        connection.commit()

    return engine


def _password(path: Path) -> str:
    try:
        return path.read_text().rstrip("\r\n")
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise InvalidInputError.at("journal_password_file", message) from error


@contextmanager
def _postgres_errors() -> Iterator[None]:
    """Context manager that converts PostgreSQL errors to ours, except broken constraints."""
    try:
        yield
    except DBAPIError as error:
        state = getattr(error.orig, "sqlstate", None)
        if state in _POSTGRES_DAMAGE:
            raise IntegrityError(f"the journal is damaged: {error.orig}") from error
        is_away = isinstance(error, OperationalError | InterfaceError)
        if is_away or error.connection_invalidated or state == _READ_ONLY:
            raise UnavailableError(f"the journal cannot be used now: {error.orig}") from error
        raise
