"""The journal: an append-only log of events under a lease.

Owns durability, order and the fence. `append` is one transaction that checks the term, inserts and
commits to disk; when it returns, the events survive a power cut. Whoever lost the lead learns it at
its next append or renewal and writes nothing. One thread at a time uses a Journal.
Knows nothing of what an event means.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError as ConstraintError

from stratagem.common.errors import ConflictError, StaleError
from stratagem.common.failpoints import failpoint
from stratagem.common.ids import RunId
from stratagem.coordinator.journal import sqlite
from stratagem.coordinator.journal.holder import Holder
from stratagem.coordinator.journal.tables import SCHEMA_VERSION, event, lease, meta, metadata

_PAGE_ROWS: Final = 1000
_LOOKS_PER_TTL: Final = 5
_CLOCK_FLOOR: Final = "clock_floor_s"


class FencedError(StaleError):
    """Another coordinator has taken the lead, or it was given up: nothing was written."""


class DuplicateKeyError(ConflictError):
    """The idempotency key was used before: nothing was written."""

    run_id: RunId
    idem_key: str

    def __init__(self, run_id: RunId, idem_key: str) -> None:
        self.run_id, self.idem_key = run_id, idem_key
        super().__init__(f"run {run_id!r} already holds an event under the key {idem_key!r}")


@dataclass(frozen=True, slots=True)
class Record:
    """One event as the journal sees it. The run id "" is the cluster itself."""

    run_id: RunId
    seq: int
    """Number of the event inside its run, from 0, without gaps."""
    kind: str
    schema_version: int
    payload: str
    time_s: float
    """Leader-clock time."""
    wall_s: float
    """For people; never decided by."""
    idem_key: str | None = None


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """An event with its place in the order of all events, and the term that wrote it."""

    position: int
    term: int
    record: Record


@dataclass(frozen=True, slots=True)
class Lead:
    """The right to write: the term, and where the leader's clock goes on."""

    term: int
    last_time_s: float


@dataclass(frozen=True, slots=True)
class _Lease:
    holder: str
    term: int
    renewals: int

    def is_free(self) -> bool:
        return not self.holder or Holder.from_json(self.holder).is_known_dead()


class Journal:
    """One connection to write and one to read; see the module for the rules."""

    def __init__(self, writer: Connection, reader: Connection) -> None:
        self._writer = writer
        self._reader = reader

    @classmethod
    def open(cls, path: Path) -> Self:
        """The journal in a SQLite file, made if absent. Local disks only: WAL shares memory."""
        journal = cls(*sqlite.connect(path))
        journal._create()
        sqlite.sync_folder(path)
        return journal

    def close(self) -> None:
        """Close the connections; the lead is not released."""
        for connection in (self._writer, self._reader):
            connection.close()
            connection.engine.dispose()

    # ---- the lead ----

    def take_lead(
        self,
        holder: Holder,
        *,
        ttl_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> Lead:
        """Block until the lead is ours, and fence whoever had it.

        A lead that was released, or whose holder died on this host, is taken at once. Any other is
        taken when its row has stood still for ttl_s of our own monotonic time, summed over looks
        of ttl_s / 5, so that neither a clock that jumps nor a pause of the whole machine
        counts as the silence of the other. To give up, let `sleep` raise.
        """
        interval_s = ttl_s / _LOOKS_PER_TTL
        seen, still_s = self._lease(), 0.0
        while True:
            if seen.is_free() or still_s >= ttl_s:
                lead = self._compare_and_take(seen, holder)
                if lead is not None:
                    return lead
            else:
                before_s = monotonic()
                sleep(interval_s)
                still_s += min(monotonic() - before_s, interval_s)
            now = self._lease()
            if now != seen:
                seen, still_s = now, 0.0

    def renew(self, term: int) -> None:
        """Show that the leader lives; call it every ttl / 3. Raises FencedError."""
        with self._write(term) as connection:
            connection.execute(update(lease).values(renewals=lease.c.renewals + 1))

    def release(self, term: int) -> None:
        """Give the lead up, so that the next need not wait; no error when it is lost already."""
        with sqlite.translated(), self._writer.begin():
            self._writer.execute(update(lease).where(lease.c.term == term).values(holder=""))

    def _lease(self) -> _Lease:
        with sqlite.translated(), self._reader.begin():
            row = self._reader.execute(select(lease.c.holder, lease.c.term, lease.c.renewals)).one()
        return _Lease(row.holder, row.term, row.renewals)

    def _compare_and_take(self, seen: _Lease, holder: Holder) -> Lead | None:
        """Take the lead if the row is still as seen."""
        taken = (
            update(lease)
            .where(lease.c.holder == seen.holder)
            .where(lease.c.term == seen.term)
            .where(lease.c.renewals == seen.renewals)
            .values(holder=holder.to_json(), term=seen.term + 1, renewals=0)
        )
        with sqlite.translated(), self._writer.begin():
            if self._writer.execute(taken).rowcount != 1:
                return None
            return Lead(seen.term + 1, self._last_time_s(self._writer))

    def _last_time_s(self, connection: Connection) -> float:
        newest = select(event.c.time_s).order_by(event.c.position.desc()).limit(1)
        floor = select(meta.c.value).where(meta.c.key == _CLOCK_FLOOR)
        return max(
            connection.execute(newest).scalar() or 0.0,
            float(connection.execute(floor).scalar() or 0.0),
        )

    # ---- the log ----

    def append(self, term: int, records: Sequence[Record]) -> list[int]:
        """Make the records durable, all or none, and return their positions.

        Raises FencedError when `term` does not lead, DuplicateKeyError when a record's key was
        used before in its run, UnavailableError when the disk is full or the file stays locked.
        """
        if not records:
            return []
        rows = [{"term": term, **asdict(record)} for record in records]
        place = insert(event).returning(event.c.position, sort_by_parameter_order=True)
        try:
            with self._write(term) as connection:
                positions = [row.position for row in connection.execute(place, rows)]
                failpoint("coordinator.journal.before_commit")
        except ConstraintError as error:
            raise self._conflict(records) from error
        failpoint("coordinator.journal.after_commit")
        return positions

    def replay(self) -> Iterator[StoredRecord]:
        """All events in the order they were appended."""
        after = 0
        while True:
            query = select(event).where(event.c.position > after).order_by(event.c.position)
            rows = self._page(query.limit(_PAGE_ROWS))
            yield from rows
            if len(rows) < _PAGE_ROWS:
                return
            after = rows[-1].position

    def read(self, run_id: RunId, from_seq: int = 0) -> Iterator[StoredRecord]:
        """The events of one run, from one number on."""
        of_run = select(event).where(event.c.run_id == run_id).order_by(event.c.seq)
        while True:
            rows = self._page(of_run.where(event.c.seq >= from_seq).limit(_PAGE_ROWS))
            yield from rows
            if len(rows) < _PAGE_ROWS:
                return
            from_seq = rows[-1].record.seq + 1

    def delete_run(self, term: int, run_id: RunId) -> None:
        """Forget all events of a run. The leader's clock does not go back."""
        with self._write(term) as connection:
            floor = str(self._last_time_s(connection))
            connection.execute(update(meta).where(meta.c.key == _CLOCK_FLOOR).values(value=floor))
            connection.execute(delete(event).where(event.c.run_id == run_id))

    @contextmanager
    def _write(self, term: int) -> Iterator[Connection]:
        """A transaction of the leader: committed at the end, or nothing happened."""
        with sqlite.translated(), self._writer.begin():
            holds = select(lease.c.term, lease.c.holder)
            row = self._writer.execute(holds).one()
            if row.term != term:
                raise FencedError(f"term {term} no longer leads: term {row.term} does")
            if not row.holder:
                raise FencedError(f"term {term} no longer leads: it was released")
            yield self._writer

    def _page(self, query: object) -> list[StoredRecord]:
        with sqlite.translated(), self._reader.begin():
            return [_stored(row) for row in self._reader.execute(query)]  # type: ignore[call-overload]

    def _conflict(self, records: Sequence[Record]) -> ConflictError:
        """Which record clashed with what the journal, or the batch itself, already holds."""
        batch: set[tuple[RunId, str]] = set()
        for record in records:
            if record.idem_key is None:
                continue
            key = (record.run_id, record.idem_key)
            same = select(func.count()).where(
                event.c.run_id == record.run_id, event.c.idem_key == record.idem_key
            )
            with self._reader.begin():
                is_stored = bool(self._reader.execute(same).scalar())
            if is_stored or key in batch:
                return DuplicateKeyError(*key)
            batch.add(key)
        spots = ", ".join(f"{record.run_id!r} {record.seq}" for record in records)
        return ConflictError(f"the journal already holds one of these events: {spots}")

    def _create(self) -> None:
        """Make the tables of an empty file; refuse a file of a newer version."""
        with sqlite.translated(), self._writer.begin():
            metadata.create_all(self._writer)
            stored = select(meta.c.value).where(meta.c.key == "schema_version")
            version = self._writer.execute(stored).scalar()
            if version is None:
                first = [("schema_version", str(SCHEMA_VERSION)), (_CLOCK_FLOOR, "0.0")]
                self._writer.execute(insert(meta), [{"key": k, "value": v} for k, v in first])
                self._writer.execute(insert(lease).values(id=1, holder="", term=0, renewals=0))
            elif int(version) > SCHEMA_VERSION:
                raise ConflictError(
                    f"the journal has schema {version}, written by a newer version; "
                    f"this one knows {SCHEMA_VERSION}"
                )


def _stored(row: Row[tuple[object, ...]]) -> StoredRecord:
    record = Record(
        run_id=RunId(row.run_id),
        seq=row.seq,
        kind=row.kind,
        schema_version=row.schema_version,
        payload=row.payload,
        time_s=row.time_s,
        wall_s=row.wall_s,
        idem_key=row.idem_key,
    )
    return StoredRecord(row.position, row.term, record)
