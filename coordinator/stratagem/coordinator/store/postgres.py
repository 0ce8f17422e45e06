"""The PostgreSQL database of a journal: connections, time limits, translation of errors.

A leader that is frozen or cut off inside a transaction holds the lock of the lease; the server ends
such a transaction after _IDLE_S, so that the next leader is not held up. Needs the extra `postgres`
(psycopg 3). Sessions are set up with SET: a pooler in between must keep them (session pooling).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Engine, Float, create_engine, event, literal_column, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError

from stratagem.common.base.errors import IntegrityError, InvalidInputError, UnavailableError
from stratagem.coordinator.store.database import Database

SCHEME: Final = "postgresql"

_PATIENCE_S: Final = 60.0
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
"""A standby of PostgreSQL, as during a fail-over."""
_DAMAGE: Final = frozenset({"XX001", "XX002"})
_MIGRATION: Final = 7_372_615_108_291_533_173  # a number of our own among all advisory locks


def open_postgres(url: str, password_file: Path | None) -> Database:
    """Return the database at postgresql://[user@]host[:port]/database[?libpq parameters]."""
    parsed = _checked(url)
    silent_s = (
        "extract(epoch FROM clock_timestamp())::float8 - greatest(lease.renewed_s,"
        " extract(epoch FROM pg_postmaster_start_time())::float8)"
    )
    return Database(
        writer=_engine(parsed, password_file),
        reader=_engine(parsed, password_file),
        translated=_translated,
        now_s=literal_column("extract(epoch FROM clock_timestamp())::float8", Float(53)),
        # A leader that could not renew because the server was down was not silent.
        silent_s=literal_column(silent_s, Float(53)),
        patience_s=_PATIENCE_S,
        migration_lock=f"SELECT pg_advisory_xact_lock({_MIGRATION})",
    )


def _checked(url: str) -> URL:
    """Return the URL for psycopg. Errors never repeat it: it may contain a password."""
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


def _engine(url: URL, password_file: Path | None) -> Engine:
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
def _translated() -> Iterator[None]:
    """Raise errors of the database as errors of this project; broken constraints pass unchanged."""
    try:
        yield
    except DBAPIError as error:
        state = getattr(error.orig, "sqlstate", None)
        if state in _DAMAGE:
            raise IntegrityError(f"the journal is damaged: {error.orig}") from error
        is_away = isinstance(error, OperationalError | InterfaceError)
        if is_away or error.connection_invalidated or state == _READ_ONLY:
            raise UnavailableError(f"the journal cannot be used now: {error.orig}") from error
        raise
