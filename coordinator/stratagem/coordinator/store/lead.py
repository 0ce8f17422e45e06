"""The lead of a journal: one row says who may write under which term, and fences others.

The fence is the term: it stands in the row, which every transaction of the leader reads, and locks,
before it writes.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Self

import structlog
from sqlalchemy import Connection, Float, literal, select, update

from stratagem.common.base.errors import StaleError, UnavailableError
from stratagem.coordinator.store.database import Database, GoneError
from stratagem.coordinator.store.schema import CLOCK_FLOOR, event, lease, meta

# ---- Holder ----
#
# The holder of the lead is one start of one process on one host.
#
# If the holder on this host is no longer alive, the next coordinator takes over from it without
# waiting. The state of a holder on another host cannot be determined here.

_STATE_FIELD = 0  # of /proc/<pid>/stat, counted after the command, which may hold spaces
_START_FIELD = 19


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds or wants the lead, identified by host, pid and start time; `name` is for
    display."""

    name: str
    host: str
    """Host name, boot id and pid namespace; "" if the system does not reveal them."""
    pid: int
    started: int
    """Clock ticks from boot to the start of the process, which distinguish a reused pid."""
    address: str = ""
    """host:port of the process, to which other coordinators refer callers while it leads."""

    @classmethod
    def of_this_process(cls, name: str = "", address: str = "") -> Self:
        """Return a record of this process, as a holder of leadership."""
        pid = os.getpid()
        stat = _stat(pid)
        started = int(stat[_START_FIELD]) if stat else 0
        name = name or f"{socket.gethostname()}:{pid}"
        return cls(name, _this_host(), pid, started, address)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the JSON that `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the holder as one line of JSON."""
        return json.dumps(asdict(self))

    def is_known_dead(self) -> bool:
        """Return True if the process ran on this host and has ended; False if in doubt."""
        if not self.host or self.host != _this_host():
            return False
        stat = _stat(self.pid)
        return stat is None or stat[_STATE_FIELD] in "ZX" or int(stat[_START_FIELD]) != self.started


def _this_host() -> str:
    """Return an identifier of this host. Containers may share a boot id, and even a host name, but
    then have different pid namespaces."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


# ---- Lead ----

_LOOKS_PER_TTL: Final = 5

_LOCKED: Final = select(lease.c.term, lease.c.holder).with_for_update()
"""The query that locks the lease row; made once, so that SQLAlchemy caches its compiled form."""

log = structlog.get_logger()


class FencedError(StaleError):
    """Another coordinator has taken the lead, or it was given up: nothing was written."""


@dataclass(frozen=True, slots=True)
class Lead:
    """The right to write: the leader's term, and the time from which the leader clock continues."""

    term: int
    last_time_s: float


@dataclass(frozen=True, slots=True)
class Lease:
    """The row in the journal that says who leads, as it was read at one time."""

    holder: Holder | None
    """The process that leads; None once the lead was released."""
    term: int
    renewals: int
    silent_s: float | None = field(compare=False)
    """The seconds since the last renewal, by the database's clock; None if not reliable."""

    def is_free(self) -> bool:
        """Return True if the lead can be taken at once: it was released, or its holder is dead."""
        return self.holder is None or self.holder.is_known_dead()


def look(database: Database) -> Lease:
    """Read from the database who leads now."""
    silent = literal(None, Float) if database.silent_s is None else database.silent_s
    query = select(lease.c.holder, lease.c.term, lease.c.renewals, silent.label("silent_s"))
    with database.read() as connection:
        row = connection.execute(query.select_from(lease)).one()
    holder = Holder.from_json(row.holder) if row.holder else None
    return Lease(holder, row.term, row.renewals, row.silent_s)


@dataclass(slots=True)
class Silence:
    """The measured time since the leader last renewed, by the database's clock if plausible.

    That clock may jump. Its first reading is believed; from then on the silence is bounded by how
    long we have seen the row unchanged and by how long ago it can have been renewed.
    """

    _seen: Lease | None = None
    _looked_s: float = 0.0
    """The time of the last look, by our own monotonic clock."""
    _least_s: float = 0.0
    _most_s: float = 0.0

    def look(self, now: Lease, now_s: float) -> None:
        """Record the lease that was read at now_s by our monotonic clock."""
        if self._seen is None:
            self._most_s = max(now.silent_s or 0.0, 0.0)
        elif now != self._seen:  # renewed since we looked
            self._least_s, self._most_s = 0.0, now_s - self._looked_s
        else:
            self._most_s += now_s - self._looked_s
        self._seen, self._looked_s = now, now_s

    def add(self, seconds: float) -> None:
        """Add seconds that we really waited; any further time on our clock was a freeze."""
        self._least_s += seconds

    @property
    def seconds(self) -> float:
        told_s = self._seen.silent_s if self._seen else None
        return self._least_s if told_s is None else min(max(told_s, self._least_s), self._most_s)


@dataclass(slots=True)
class Candidate:
    """A coordinator that waits for the lead of a journal."""

    database: Database
    holder: Holder
    ttl_s: float
    on_wait: Callable[[Lease], object]
    """Called with the lease each time that another process is found to hold it."""
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    _asked_for: int | None = None
    """The leadership term of an attempt to take the lead whose answer was lost on the way."""
    _silence: Silence = field(default_factory=Silence)

    def wait(self) -> Lead:
        """Check the lease repeatedly until this process has the lead."""
        while True:
            try:
                seen = look(self.database)
                self._silence.look(seen, self.monotonic())
                lead = self._try(seen)
            except UnavailableError as error:
                if isinstance(error, GoneError) or not self.database.patience_s:
                    raise
                log.warning("waiting for the journal's database", reason=str(error))
                self.sleep(self.ttl_s / _LOOKS_PER_TTL)  # the leader could not renew either
            else:
                if lead is not None:
                    return lead

    def _try(self, seen: Lease) -> Lead | None:
        if self._asked_for == seen.term and seen.holder == self.holder:
            with self.database.read() as connection:
                return Lead(seen.term, last_time_s(connection))
        silent_s = self._silence.seconds
        if seen.is_free() or silent_s >= self.ttl_s:
            return self._compare_and_take(seen)
        self.on_wait(seen)
        interval_s = self.ttl_s / _LOOKS_PER_TTL
        self._pause(interval_s if seen.silent_s is None else min(interval_s, self.ttl_s - silent_s))
        return None

    def _pause(self, interval_s: float) -> None:
        before_s = self.monotonic()
        self.sleep(interval_s)
        self._silence.add(min(self.monotonic() - before_s, interval_s))

    def _compare_and_take(self, seen: Lease) -> Lead | None:
        """Take the lead if the row is unchanged since `seen`; else return None."""
        take = (
            update(lease)
            .where(lease.c.holder == (seen.holder.to_json() if seen.holder else ""))
            .where(lease.c.term == seen.term)
            .where(lease.c.renewals == seen.renewals)
            .values(
                holder=self.holder.to_json(),
                term=seen.term + 1,
                renewals=0,
                renewed_s=self.database.now_s,
            )
        )
        self._asked_for = seen.term + 1
        with self.database.write() as connection:
            is_ours = connection.execute(take).rowcount == 1
            lead = Lead(seen.term + 1, last_time_s(connection)) if is_ours else None
        self._asked_for = None
        return lead


@contextmanager
def leading(database: Database, term: int) -> Iterator[Connection]:
    """Context manager for a transaction of the leader. Raises FencedError if `term` does not lead.

    The lock on the row makes a process that wants the lead wait for the end of this transaction; a
    retry waits, too, and so sees for certain whether this was committed.
    """
    with database.write() as connection:
        row = connection.execute(_LOCKED).one()
        if row.term != term:
            raise FencedError(f"term {term} no longer leads: term {row.term} does")
        if not row.holder:
            raise FencedError(f"term {term} no longer leads: it was released")
        yield connection


def renew(database: Database, term: int) -> None:
    """Renew the lease in a transaction of the leader. Raises FencedError."""
    now = update(lease).values(renewals=lease.c.renewals + 1, renewed_s=database.now_s)
    with leading(database, term) as connection:
        connection.execute(now)


def release(database: Database, term: int) -> None:
    """Release the lead; do nothing if it is lost already."""
    with database.write() as connection:
        connection.execute(update(lease).where(lease.c.term == term).values(holder=""))


def last_time_s(connection: Connection) -> float:
    """Return the newest time of all events, even deleted ones, from which the leader clock
    continues."""
    newest = select(event.c.time_s).order_by(event.c.position.desc()).limit(1)
    floor = select(meta.c.value).where(meta.c.key == CLOCK_FLOOR)
    return max(
        connection.execute(newest).scalar() or 0.0,
        float(connection.execute(floor).scalar() or 0.0),
    )
