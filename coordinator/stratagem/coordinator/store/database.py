"""The database interface of the journal: transactions, the clock, and waiting for a lost database.

sqlite.py and postgres.py implement it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog
from sqlalchemy import ColumnElement, Connection, Engine

from stratagem.common.base.errors import UnavailableError

_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 1.0

T = TypeVar("T")


class GoneError(UnavailableError):
    """The database cannot be used, and will not come back by itself: waiting does not help."""


log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Database:
    """The connections to one database, and its peculiarities. One thread at a time uses it."""

    writer: Engine
    """Its transactions may write."""
    reader: Engine
    translated: Callable[[], AbstractContextManager[None]]
    """Makes UnavailableError and IntegrityError of the errors of the driver."""
    now_s: ColumnElement[float]
    """The database's own clock, seconds since 1970."""
    silent_s: ColumnElement[float] | None
    """Seconds without a renewal of the lease by that clock; None where it is not to be trusted."""
    patience_s: float
    """Seconds for which a database that went away is waited for."""
    migration_lock: str
    """SQL that lets one process at a time change the schema; "" where every transaction does."""

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction: committed at the end, or nothing happened."""
        with self.translated(), self.writer.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that only reads."""
        with self.translated(), self.reader.begin() as connection:
            yield connection

    def persist(self, act: Callable[[bool], T]) -> T:
        """Do a transaction, again and again while the database is away, for patience_s at most.

        `act` is told whether it was tried before: then it may have been committed, and only the
        answer was lost.
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
