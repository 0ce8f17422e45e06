"""The step history, stored as rows of the journal's database: one per run, party and segment.

A row is written in the transaction of the event that ends its segment, so neither exists without
the other. A repeated segment replaces its row; its record of the steps is then the same, and a
difference is a defect of the program, which is logged. Rows of many segments are merged into one
afterwards, when nothing waits for it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

import numpy as np
import structlog
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Dialect,
    Row,
    Select,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    literal_column,
    select,
)
from sqlalchemy.sql.compiler import SQLCompiler

from stratagem.common.base.ids import Party, RunId
from stratagem.common.history import Columns, Series
from stratagem.common.history.columns import ROW_BYTES, concatenated, part_of
from stratagem.common.history.recording import (
    MAX_NAME,
    MAX_SERIES,
    MAX_UNPACKED_BYTES,
    is_of_newest_segment,
    pack,
    unpack,
)
from stratagem.common.process.failpoints import failpoint
from stratagem.coordinator.store.schema import history

# ---- Rows ----
#
# A stored row covers one segment, or several consecutive ones.
#
# In a row of several segments no two of them share a row of a series. It can therefore be cut at
# the end of any segment, as when a run returns to an earlier commit, and has the same content as
# the rows that it was made of.

Ends = tuple[tuple[int, int], ...]
"""Pairs (segment, last step of the segment), in order."""
_MAX_HEAD_BYTES = MAX_SERIES * (MAX_NAME * 6 + 32)
"""The most bytes of names and numbers in addition to a row's values; a character may take six
bytes."""


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """The packed step history of one or more segments: steps from_step + 1 to to_step."""

    run_id: RunId
    party: Party
    segment: int
    """The last segment in the row."""
    stride: int
    from_step: int
    to_step: int
    rows: bytes
    ends: Ends = ()
    """The ends of all segments in the row, if there are several."""

    @property
    def all_ends(self) -> Ends:
        """Return (segment, last step) of all segments in the row."""
        return self.ends or ((self.segment, self.to_step),)


def behind(columns: Columns, step: int) -> Columns:
    """Return the values of the steps after `step`, which is the last step of a stored row."""
    return part_of(columns, int(np.searchsorted(columns.step, step, "right")), len(columns))


def one_row(rows: Sequence[HistoryRow]) -> HistoryRow | None:
    """Merge consecutive rows of a party into one; None if one row cannot hold them. If only the
    newest segment of the party is kept, return the last row."""
    if is_of_newest_segment(rows[-1].party):
        return rows[-1]
    pieces: dict[Series, list[Columns]] = {}
    num_rows = 0
    for row in rows:
        for series, columns in unpack(row.rows).items():
            pieces.setdefault(series, []).append(columns)
            num_rows += len(columns)
    fits = num_rows * ROW_BYTES <= MAX_UNPACKED_BYTES - _MAX_HEAD_BYTES
    if not fits or len(pieces) > MAX_SERIES or len({row.stride for row in rows}) > 1:
        return None
    whole = {series: concatenated(pieces[series]) for series in sorted(pieces)}
    ends = tuple(end for row in rows for end in row.all_ends)
    return replace(rows[-1], from_step=rows[0].from_step, rows=pack(whole), ends=ends)


def cut_to(row: HistoryRow, segment: int) -> HistoryRow | None:
    """Return the part of a row up to this segment, included; None if no segment is left."""
    ends = tuple(end for end in row.all_ends if end[0] <= segment)
    if len(ends) == len(row.all_ends):
        return row
    if not ends:
        return None
    last, step = ends[-1]
    parts: Mapping[Series, Columns] = {
        series: part_of(columns, 0, int(np.searchsorted(columns.step, step, "right")))
        for series, columns in unpack(row.rows).items()
    }
    packed = pack({series: columns for series, columns in parts.items() if len(columns)})
    return replace(row, segment=last, to_step=step, rows=packed, ends=ends if len(ends) > 1 else ())


# ---- Table ----

log = structlog.get_logger()


_COLUMNS: Final = tuple(column.name for column in history.c)
_GIVEN: Final = tuple(name for name in _COLUMNS if name != "ends")
_ITS: Final = {name: bindparam(name, type_=history.c[name].type) for name in _GIVEN}
_OF_PARTY: Final = [history.c[name] == _ITS[name] for name in ("run_id", "party")]
_SUCH: Final[Select[Any]] = select(literal_column("1")).where(
    *_OF_PARTY, history.c.segment >= _ITS["segment"]
)
_NEW: Final = insert(history).from_select(
    _GIVEN, select(*_ITS.values()).where(~exists(_SUCH.correlate(None)))
)
"""Inserts a row after all others of its party, in one statement, as each segment ends with it."""


def put(connection: Connection, rows: Sequence[HistoryRow]) -> None:
    """Write the rows of segments that end in this transaction."""
    for row in rows:
        if row.ends or not _put_behind(connection, row):
            _replace(connection, row)


def _put_behind(connection: Connection, row: HistoryRow) -> bool:
    """Append the row of a segment; return False, without writing, if its party has a row of that or
    a later segment.

    The statement is compiled once and passed to the driver: SQLAlchemy's overhead for each
    execution is several times the database's time, in a transaction that commits wait for.
    """
    statement = _new(connection.dialect)
    values: tuple[Any, ...] | dict[str, Any] = statement.values_of(row)
    if not statement.is_positional:
        values = dict(zip(statement.names, values, strict=True))
    return bool(connection.exec_driver_sql(statement.text, values).rowcount)


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement in the driver's form, and the function that returns its parameters for a row."""

    text: str
    names: tuple[str, ...]
    is_positional: bool
    values_of: Callable[[HistoryRow], tuple[Any, ...]]


@lru_cache(maxsize=4)
def _new(dialect: Dialect) -> _Statement:
    compiled = _NEW.compile(dialect=dialect)
    assert isinstance(compiled, SQLCompiler)
    names = tuple(compiled.positiontup or _GIVEN)
    return _Statement(str(compiled), names, bool(compiled.positiontup), attrgetter(*names))


def _replace(connection: Connection, row: HistoryRow) -> None:
    """Write the row of a segment that was repeated, or that comes before a stored row."""
    query = select(history).where(*_of(row.run_id, row.party), history.c.segment >= row.segment)
    rows = [_row(raw) for raw in connection.execute(query.order_by(history.c.segment).limit(1))]
    covers = [stored_row for stored_row in rows if stored_row.all_ends[0][0] <= row.segment]
    for stored in covers:
        if not stored.ends and stored.rows != row.rows and _exact(stored) != _exact(row):
            ids = {"run_id": row.run_id, "party": row.party, "segment": row.segment}
            log.error("a segment that was done again has recorded other values", **ids)
        _cut(connection, stored, row.segment - 1)
    connection.execute(insert(history).values(_values(row)))


def cut(connection: Connection, run_id: RunId, segment: int) -> None:
    """Delete the history of a run after the segment to which the run returns."""
    query = select(history).where(history.c.run_id == run_id, history.c.segment > segment)
    for row in connection.execute(query).all():
        _cut(connection, _row(row), segment)


def _cut(connection: Connection, row: HistoryRow, segment: int) -> None:
    _delete(connection, row)
    shortened = cut_to(row, segment)
    if shortened is not None:
        connection.execute(insert(history).values(_values(shortened)))


def parties(connection: Connection, run_id: RunId) -> list[Party]:
    """Return the parties of a run that have rows, sorted by name."""
    query = select(history.c.party).where(history.c.run_id == run_id).distinct()
    return sorted(Party(party) for (party,) in connection.execute(query))


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A range of steps, both ends included; queries return all rows that contain some of them."""

    from_step: int = 1
    to_step: int | None = None


def page(
    connection: Connection, run_id: RunId, party: Party, span: StepSpan, behind: int, limit: int
) -> list[HistoryRow]:
    """Return the first `limit` rows of a party behind a segment that have steps of the span."""
    its = history.c
    rows = select(history).where(*_of(run_id, party), its.segment > behind)
    rows = rows.where(its.to_step > _number(span.from_step) * its.stride)
    if span.to_step is not None:
        rows = rows.where(its.from_step < (_number(span.to_step) + 1) * its.stride)
    return [_row(row) for row in connection.execute(rows.order_by(its.segment).limit(limit))]


def counts(connection: Connection, run_id: RunId) -> dict[Party, int]:
    """Return the number of rows, for those parties of a run that have more than one.

    Only the key is read: the other columns lie behind the large values, which the database would
    have to read.
    """
    its = history.c
    query = select(its.party, func.count()).where(its.run_id == run_id).group_by(its.party)
    counted = connection.execute(query.having(func.count() > 1).order_by(its.party))
    return {Party(party): num_rows for party, num_rows in counted}


def unmerged_runs(connection: Connection) -> set[RunId]:
    """Return the runs that have a party with more than one row."""
    by_party = select(history.c.run_id).group_by(history.c.run_id, history.c.party)
    return {RunId(run_id) for (run_id,) in connection.execute(by_party.having(func.count() > 1))}


def full_parties(connection: Connection, run_id: RunId, num_rows: int) -> list[Party]:
    """Return the parties of a run whose last num_rows rows have one segment each.

    At most one row per party is read. The result may contain a party that another coordinator has
    merged in between.
    """
    its = history.c
    parties = [p for p, num in counts(connection, run_id).items() if num >= num_rows]
    ends = {
        party: select(its.ends).where(*_of(run_id, party)).order_by(its.segment.desc())
        for party in parties
    }
    return [
        party
        for party in parties
        if connection.execute(ends[party].limit(1).offset(num_rows - 1)).scalar() is None
    ]


def single_rows(
    connection: Connection, run_id: RunId, party: Party, limit: int
) -> list[HistoryRow]:
    """Return the first `limit` rows of a party that cover a single segment each."""
    query = select(history).where(*_of(run_id, party), history.c.ends.is_(None))
    return [_row(row) for row in connection.execute(query.order_by(history.c.segment).limit(limit))]


def merge(connection: Connection, rows: Sequence[HistoryRow], into: HistoryRow) -> bool:
    """Replace rows of a party by one with the same content; return False, without a change, if they
    changed since they were read."""
    first, last = rows[0].segment, rows[-1].segment
    its = history.c
    between = (*_of(into.run_id, into.party), its.segment >= first, its.segment <= last)
    query = select(history).where(*between).order_by(its.segment)
    if [_row(row) for row in connection.execute(query)] != [*rows]:
        return False
    connection.execute(delete(history).where(*between))
    failpoint("coordinator.history.merging")
    connection.execute(insert(history).values(_values(into)))
    return True


def forget(connection: Connection, run_id: RunId) -> None:
    """Delete the step history of a run."""
    connection.execute(delete(history).where(history.c.run_id == run_id))


def _of(run_id: RunId, party: Party) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return history.c.run_id == run_id, history.c.party == party


def _number(step: int) -> ColumnElement[int]:
    """Return SQL for the index of the value that covers a step, given the steps per value."""
    return literal(step - 1, BigInteger) // history.c.stride


def _delete(connection: Connection, row: HistoryRow) -> None:
    its = (*_of(row.run_id, row.party), history.c.segment == row.segment)
    connection.execute(delete(history).where(*its))


def _values(row: HistoryRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in _COLUMNS}
    values["ends"] = json.dumps(row.ends) if row.ends else None
    return values


def _row(row: Row[Any]) -> HistoryRow:
    ends = tuple((segment, step) for segment, step in json.loads(row.ends or "[]"))
    return HistoryRow(
        *(RunId(row.run_id), Party(row.party), row.segment, row.stride, row.from_step),
        *(row.to_step, bytes(row.rows), ends),
    )


def _exact(row: HistoryRow) -> dict[str, bytes]:
    """Return the encoded values of the series that depend on no clock or machine, keyed by name."""
    rows = unpack(row.rows).items()
    return {series.name: columns.to_bytes() for series, columns in rows if not series.observed}
