"""The step history as rows of the journal's database: one per run, party and segment.

A row is written in the transaction of the event that ends its segment, so there is none without the
other. A segment that is done again replaces its row; what it has recorded of the steps is the same
then, and anything else is a defect of ours, which is logged.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import structlog
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    bindparam,
    delete,
    exists,
    insert,
    literal,
    select,
    update,
)

from stratagem.common.base.ids import Party, RunId
from stratagem.common.history.packing import unpack
from stratagem.coordinator.store.journal.tables import history

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """The step history of one segment: steps from from_step + 1 to to_step, packed."""

    run_id: RunId
    party: Party
    segment: int
    stride: int
    from_step: int
    to_step: int
    rows: bytes


_ITS: Final = {each.name: bindparam(f"its_{each.name}", type_=each.type) for each in history.c}
_SAME: Final = [history.c[name] == _ITS[name] for name in ("run_id", "party", "segment")]
_NEW: Final = (
    insert(history)
    .from_select([*_ITS], select(*_ITS.values()).where(~exists().where(*_SAME).correlate(None)))
    .execution_options(preserve_rowcount=True)
)
"""Writes a row, unless there is one of its name: one statement, as every segment ends with it."""


def put(connection: Connection, rows: Sequence[HistoryRow]) -> None:
    """Write the rows of segments that end in this transaction."""
    for row in rows:
        values = {f"its_{name}": value for name, value in asdict(row).items()}
        if not connection.execute(_NEW, values).rowcount:
            _replace(connection, row)


def _replace(connection: Connection, row: HistoryRow) -> None:
    key = (
        history.c.run_id == row.run_id,
        history.c.party == row.party,
        history.c.segment == row.segment,
    )
    stored = bytes(connection.execute(select(history.c.rows).where(*key)).scalar_one())
    if stored != row.rows and _exact(stored) != _exact(row.rows):
        ids = {"run_id": row.run_id, "party": row.party, "segment": row.segment}
        log.error("a segment that was done again has recorded other values", **ids)
    connection.execute(update(history).where(*key).values(asdict(row)))


def parties(connection: Connection, run_id: RunId) -> list[Party]:
    """Return the parties of a run that have rows, in order of name."""
    query = select(history.c.party).where(history.c.run_id == run_id).distinct()
    return sorted(Party(party) for (party,) in connection.execute(query))


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Steps from from_step to to_step, both included, and those in one row with them."""

    from_step: int = 1
    to_step: int | None = None


def page(
    connection: Connection, run_id: RunId, party: Party, span: StepSpan, behind: int, limit: int
) -> list[HistoryRow]:
    """Return rows of a party with steps of the span, behind a segment, in order, as many as the
    limit."""
    its = history.c
    rows = select(history).where(its.run_id == run_id, its.party == party, its.segment > behind)
    rows = rows.where(its.to_step > _number(span.from_step) * its.stride)
    if span.to_step is not None:
        rows = rows.where(its.from_step < (_number(span.to_step) + 1) * its.stride)
    rows = rows.order_by(its.segment).limit(limit)
    return [
        HistoryRow(
            run_id, party, row.segment, row.stride, row.from_step, row.to_step, bytes(row.rows)
        )
        for row in connection.execute(rows)
    ]


def _number(step: int) -> ColumnElement[int]:
    """Return the number of the row, of the stride of a segment, that a step is in."""
    return literal(step - 1, BigInteger) // history.c.stride


def forget(connection: Connection, run_id: RunId) -> None:
    """Delete the rows of a run."""
    connection.execute(delete(history).where(history.c.run_id == run_id))


def _exact(packed: bytes) -> dict[str, bytes]:
    """Return the values that do not depend on clocks and machines."""
    rows = unpack(packed).items()
    return {series.name: columns.to_bytes() for series, columns in rows if not series.observed}
