"""Journal is an append-only log of events under a lease; it guarantees durability, order and
fencing.

`append` is one transaction that checks the term, inserts and commits to disk; when it returns, the
events survive a power cut. A coordinator that lost the lead finds out at its next append or renewal
and writes nothing. The journal waits for a database that went away; events that were committed
meanwhile are found there and not written twice. One thread at a time uses a Journal. The meaning of
an event is unknown here.
"""

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from sqlalchemy import (
    Connection,
    Row,
    ScalarSelect,
    and_,
    bindparam,
    delete,
    func,
    insert,
    select,
    tuple_,
    update,
)
from sqlalchemy.exc import IntegrityError as ConstraintError

from stratagem.common.base.errors import ConflictError, InvalidInputError
from stratagem.common.base.ids import RunId
from stratagem.common.process.failpoints import failpoint
from stratagem.coordinator.store import step_history
from stratagem.coordinator.store.database import SCHEME, Database, open_postgres, open_sqlite
from stratagem.coordinator.store.lead import (
    Candidate,
    Holder,
    Lead,
    Lease,
    last_time_s,
    leading,
    release,
    renew,
)
from stratagem.coordinator.store.schema import CLOCK_FLOOR, IDENTITY, event, meta, migrate, summary
from stratagem.coordinator.store.snapshot import Snapshot, restore
from stratagem.coordinator.store.step_history import HistoryRow

# ---- Summaries ----
#
# A summary takes the place of a run's events for readers that only want its outcome.
#
# A summary covers a run up to one event. A newer event makes it void, and so does its deletion,
# or another version of the program: no version has to read another version's summaries. A summary
# is therefore never wrong, even when code that does not know of it writes events.


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A summary of a run up to its newest event, as text, so that its events need not be read."""

    run_id: RunId
    version: str
    """The version of the program that wrote the summary; only that version can read it."""
    brief: str
    """The part of the summary that is read for every run at start-up."""
    shown: str
    """The part of the summary that is read when a caller asks for the run."""


def put(connection: Connection, summaries: Sequence[RunSummary]) -> None:
    """Replace the stored summaries of these runs; the runs' newest events are written already."""
    if not summaries:
        return
    connection.execute(delete(summary).where(summary.c.run_id.in_([s.run_id for s in summaries])))
    for newer in summaries:
        of_run = select(event.c.position).where(event.c.run_id == newer.run_id)
        newest = of_run.order_by(event.c.seq.desc()).limit(1).scalar_subquery()
        row = {**asdict(newer), "position": newest}
        connection.execute(insert(summary).values(row))


# ---- Journal ----

_PAGE_ROWS: Final = 1000

T = TypeVar("T")


class DuplicateKeyError(ConflictError):
    """The idempotency key was used before: nothing was written."""

    run_id: RunId
    idem_key: str

    def __init__(self, run_id: RunId, idem_key: str) -> None:
        self.run_id, self.idem_key = run_id, idem_key
        super().__init__(f"run {run_id!r} already holds an event under the key {idem_key!r}")


@dataclass(frozen=True, slots=True)
class Record:
    """One event, as a row of the journal. The run id "" stands for the cluster itself."""

    run_id: RunId
    seq: int
    """The number of the event inside its run: from 0, without gaps."""
    kind: str
    schema_version: int
    payload: str
    time_s: float
    """The leader-clock time of the event."""
    wall_s: float
    """The wall-clock time of the event, for display only."""
    idem_key: str | None = None


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A stored event, with its position in the order of all events, and the term that wrote it."""

    position: int
    term: int
    record: Record


_STORED: Final = tuple(
    event.c[key] for key in ("position", "term", *(field.name for field in fields(Record)))
)
"""The columns of a StoredRecord, in the order of its fields."""
_REPLACED: Final = (
    update(event)
    .where(event.c.run_id == bindparam("of_run"), event.c.seq == bindparam("number"))
    .values({key: bindparam(f"new_{key}") for key in ("term", "kind", "schema_version", "payload")})
    .values(idem_key=None)
)
_PLACED: Final = insert(event).returning(event.c.position, sort_by_parameter_order=True)


class Journal:
    """The journal in one database; see the module for the rules."""

    def __init__(self, database: Database, again: Callable[[], Database]) -> None:
        """Use an open database. again: opens the same database with new connections."""
        self._database = database
        self._again = again

    @classmethod
    def open(cls, place: Path | str, *, password_file: Path | None = None) -> Self:
        """Open the journal at a place; it is made, or migrated to the present schema, if need be.

        place: the path of a SQLite file, on a local disk only (WAL shares memory), or
        postgresql://[user@]host[:port]/database. Raises InvalidInputError for another URL,
        UnavailableError if the database cannot be reached, ConflictError for a newer schema.
        """
        database = _database(place, password_file)
        try:
            migrate(database)
        except BaseException:
            database.close()
            raise
        return cls(database, lambda: _database(place, password_file))

    def close(self) -> None:
        """Close the connections; the lead is kept."""
        self._database.close()

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the journal on new connections, for the caller to close."""
        database = self._again()
        try:
            return Snapshot(database)
        except BaseException:
            database.close()
            raise

    @classmethod
    def restore(cls, path: Path, place: Path | str, *, password_file: Path | None = None) -> int:
        """Restore a snapshot's file into the journal at a place; return the term from which it
        continues. Raises ConflictError if the journal there has events."""
        journal = cls.open(place, password_file=password_file)
        try:
            return restore(path, journal._database)
        finally:
            journal.close()

    # ---- the lead ----

    def take_lead(
        self,
        holder: Holder,
        *,
        ttl_s: float,
        on_wait: Callable[[Lease], object] = lambda lease: None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> Lead:
        """Block until this process has the lead, and fence the previous leader.

        A lead that was released, or whose holder died on this host, is taken at once. Any other is
        taken after ttl_s without a renewal: over PostgreSQL by the database's clock, not counting
        its down time; over SQLite by our own monotonic time, summed over looks of ttl_s / 5, so
        that neither a clock jump nor a pause of the whole machine counts as the other's silence. To
        give up, let `sleep` raise.
        """
        return Candidate(self._database, holder, ttl_s, on_wait, monotonic, sleep).wait()

    def renew(self, term: int) -> None:
        """Renew the lease; call this every ttl / 3. Raises FencedError."""
        self._database.persist(lambda _: renew(self._database, term))

    def release(self, term: int) -> None:
        """Release the lead, so that the next leader need not wait; do nothing if it is lost."""
        release(self._database, term)

    def identity(self, term: int) -> str:
        """Return the unique identifier of this journal, which copies of it share."""
        return self._database.persist(lambda _: self._identity(term))

    def _identity(self, term: int) -> str:
        with leading(self._database, term) as connection:
            stored = select(meta.c.value).where(meta.c.key == IDENTITY)
            identity = connection.execute(stored).scalar()
            if identity is None:
                identity = secrets.token_hex(8)
                connection.execute(insert(meta).values(key=IDENTITY, value=identity))
            return identity

    # ---- the log ----

    def append(
        self,
        term: int,
        records: Sequence[Record],
        summaries: Sequence[RunSummary] = (),
        histories: Sequence[HistoryRow] = (),
        returns: Mapping[RunId, int] | None = None,
    ) -> list[int]:
        """Make the records durable, all or none, and return their positions.

        summaries: the summaries of runs that are at rest now. histories: the step histories of
        segments that have ended. returns: the segment to which each run returns, keyed by run; its
        history after that segment is deleted.

        Raises FencedError if `term` does not lead, DuplicateKeyError if a record's key was used
        before in its run, UnavailableError if the disk is full, the file stays locked, or the
        database does not come back.
        """
        if not records and not summaries and not histories:
            return []
        return self._persist(
            lambda again: self._append(term, records, summaries, histories, returns or {}, again)
        )

    def _append(
        self,
        term: int,
        records: Sequence[Record],
        summaries: Sequence[RunSummary],
        histories: Sequence[HistoryRow],
        returns: Mapping[RunId, int],
        is_repeat: bool,
    ) -> list[int]:
        rows = [{"term": term, **asdict(record)} for record in records]
        try:
            with self._writing(term) as connection:
                if is_repeat and (committed := _committed(connection, term, records)):
                    return committed
                written = connection.execute(_PLACED, rows) if rows else ()
                positions = [row.position for row in written]
                put(connection, summaries)
                step_history.put(connection, histories)
                for run_id, segment in returns.items():  # what it trains anew ends later
                    step_history.cut(connection, run_id, segment)
                return positions
        except ConstraintError as error:
            raise self._conflict(records) from error

    def sum_up(self, term: int, records: Sequence[Record]) -> None:
        """Replace the events that have the records' numbers, and delete all earlier events of the
        run, which the records summarize; all or nothing.

        The records keep the positions and times of the events that they replace. Raises FencedError
        if `term` does not lead.
        """
        self._persist(lambda _: self._sum_up(term, records))

    def _sum_up(self, term: int, records: Sequence[Record]) -> None:
        first, last = records[0], records[-1]
        of_run = event.c.run_id == first.run_id
        with self._writing(term) as connection:
            places = select(func.count()).where(of_run, event.c.seq.between(first.seq, last.seq))
            if connection.execute(places).scalar() != len(records):
                raise ConflictError(f"not all events {first.seq} to {last.seq} are there")
            connection.execute(delete(event).where(of_run, event.c.seq < first.seq))
            for record in records:  # each may be large, and need not be in memory with all others
                row = {"new_term": term, "new_kind": record.kind, "new_payload": record.payload}
                place = {"of_run": record.run_id, "number": record.seq}
                connection.execute(
                    _REPLACED, {**place, **row, "new_schema_version": record.schema_version}
                )

    @contextmanager
    def _writing(self, term: int) -> Iterator[Connection]:
        """Context manager that opens a transaction which writes events as the leader."""
        with leading(self._database, term) as connection:
            yield connection
            failpoint("coordinator.journal.before_commit")

    def _persist(self, act: Callable[[bool], T]) -> T:
        """Run a transaction as the leader, with retries; see Database.persist."""
        done = self._database.persist(act)
        failpoint("coordinator.journal.after_commit")
        return done

    def briefs(self, version: str) -> dict[RunId, str | None]:
        """Return the brief of each run that has events, in order of first events; None if the run's
        events must be read. A brief is used only if its summary has this version and covers the
        run's newest event."""
        # Looks into the index once per run, however many events it has.
        name = select(func.min(event.c.run_id).label("run_id")).cte("name", recursive=True)
        following = select(func.min(event.c.run_id)).where(event.c.run_id > name.c.run_id)
        name = name.union_all(
            select(following.correlate(name).scalar_subquery()).where(name.c.run_id.is_not(None))
        )

        def place(newest: bool) -> ScalarSelect[int]:
            order = event.c.seq.desc() if newest else event.c.seq
            of_run = select(event.c.position).where(event.c.run_id == name.c.run_id)
            return of_run.order_by(order).limit(1).correlate(name).scalar_subquery()

        holds = and_(
            summary.c.run_id == name.c.run_id,
            summary.c.position == place(newest=True),
            summary.c.version == version,
        )
        query = (
            select(name.c.run_id, summary.c.brief)
            .select_from(name.outerjoin(summary, holds))
            .where(name.c.run_id.is_not(None))
            .order_by(place(newest=False))
        )
        return self.ask(lambda c: {RunId(row.run_id): row.brief for row in c.execute(query)})

    def shown(self, run_ids: Collection[RunId]) -> Mapping[RunId, str]:
        """Return the views in these runs' newest summaries; runs without one are left out."""
        wanted = select(summary.c.run_id, summary.c.shown).where(summary.c.run_id.in_(run_ids))
        return self.ask(lambda c: {RunId(row.run_id): row.shown for row in c.execute(wanted)})

    def read(
        self, run_id: RunId, from_seq: int = 0, page_rows: int = _PAGE_ROWS
    ) -> Iterator[StoredRecord]:
        """Yield the events of one run from from_seq on; page_rows of them are read at once."""
        while True:
            rows = self.page(run_id, from_seq, num_rows=page_rows)
            yield from rows
            if len(rows) < page_rows:
                return
            from_seq = rows[-1].record.seq + 1

    def page(
        self,
        run_id: RunId,
        from_seq: int = 0,
        before_seq: int | None = None,
        *,
        num_rows: int,
        kinds: Collection[str] = (),
        newest_first: bool = False,
    ) -> list[StoredRecord]:
        """Return at most num_rows events of one run, of these kinds (by default all) and in this
        span of numbers, from its start or, with newest_first, its end."""
        order = event.c.seq.desc() if newest_first else event.c.seq
        query = select(*_STORED).where(event.c.run_id == run_id, event.c.seq >= from_seq)
        if before_seq is not None:
            query = query.where(event.c.seq < before_seq)
        if kinds:
            query = query.where(event.c.kind.in_(kinds))
        query = query.order_by(order).limit(num_rows)
        return self.ask(lambda connection: list(map(_stored, connection.execute(query))))

    def delete_run(self, term: int, run_id: RunId) -> None:
        """Delete all events of a run; the leader's clock does not go back."""
        self._database.persist(lambda _: self._delete_run(term, run_id))

    def _delete_run(self, term: int, run_id: RunId) -> None:
        with leading(self._database, term) as connection:
            floor = str(last_time_s(connection))
            connection.execute(update(meta).where(meta.c.key == CLOCK_FLOOR).values(value=floor))
            connection.execute(delete(event).where(event.c.run_id == run_id))
            connection.execute(delete(summary).where(summary.c.run_id == run_id))
            step_history.forget(connection, run_id)

    def merge_histories(self, term: int, rows: Sequence[HistoryRow], into: HistoryRow) -> bool:
        """Replace rows of a party's step history by one with the same content; return False if they
        changed since they were read. Raises FencedError."""

        def merge(_is_repeat: bool) -> bool:
            with leading(self._database, term) as connection:
                return step_history.merge(connection, rows, into)

        return self._database.persist(merge)

    def ask(self, query: Callable[[Connection], T]) -> T:
        """Return the result of a query (see step_history.py), run in a read-only transaction."""

        def read(_is_repeat: bool) -> T:
            with self._database.read() as connection:
                return query(connection)

        return self._database.persist(read)

    def _conflict(self, records: Sequence[Record]) -> ConflictError:
        """Return the error that names the record which clashes with the journal or this batch."""
        batch: set[tuple[RunId, str]] = set()
        for record in records:
            if record.idem_key is None:
                continue
            key = (record.run_id, record.idem_key)
            same = select(func.count()).where(
                event.c.run_id == record.run_id, event.c.idem_key == record.idem_key
            )
            with self._database.read() as connection:
                is_stored = bool(connection.execute(same).scalar())
            if is_stored or key in batch:
                return DuplicateKeyError(*key)
            batch.add(key)
        spots = ", ".join(f"{record.run_id!r} {record.seq}" for record in records)
        return ConflictError(f"the journal already holds one of these events: {spots}")


def _database(place: Path | str, password_file: Path | None) -> Database:
    if isinstance(place, Path):
        return open_sqlite(place)
    scheme, colon, _ = place.partition("://")
    if not colon:
        return open_sqlite(Path(place))
    if scheme != SCHEME:
        raise InvalidInputError.at(
            "journal", f"{scheme}:// is neither {SCHEME}:// nor the path of a SQLite file"
        )
    return open_postgres(place, password_file)


def _committed(connection: Connection, term: int, records: Sequence[Record]) -> list[int]:
    """Return the positions of these records if an earlier attempt has committed them; else []."""
    spots = [(record.run_id, record.seq) for record in records]
    query = select(*_STORED).where(event.c.term == term)
    rows = connection.execute(query.where(tuple_(event.c.run_id, event.c.seq).in_(spots)))
    positions = {stored.record: stored.position for stored in map(_stored, rows)}
    return [positions[record] for record in records] if set(positions) == set(records) else []


def _stored(row: Row[Any]) -> StoredRecord:
    position, term, *of_record = tuple(row)  # by name, each takes three times as long
    return StoredRecord(position, term, Record(*of_record))
