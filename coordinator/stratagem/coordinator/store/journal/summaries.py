"""Summaries of runs: they take the place of a run's events for readers that only want its outcome.

A summary covers a run up to one event. A newer event makes it void, and so does its deletion, or
another version of the program: no version has to read what another one wrote. So it is never wrong,
even when events are written by code that does not know of it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, ScalarSelect, and_, delete, func, insert, select

from stratagem.common.base.ids import RunId
from stratagem.coordinator.store.journal.tables import event, summary


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A summary of a run up to its newest event, as text."""

    run_id: RunId
    version: str
    """Version of the program that wrote it, and that alone can read it."""
    brief: str
    """The part that is read of every run at the start."""
    shown: str
    """The part that is read when a caller asks for the run."""


def put(connection: Connection, summaries: Sequence[RunSummary]) -> None:
    """Replace the summaries of these runs, whose newest events are written."""
    if not summaries:
        return
    connection.execute(delete(summary).where(summary.c.run_id.in_([s.run_id for s in summaries])))
    for newer in summaries:
        of_run = select(event.c.position).where(event.c.run_id == newer.run_id)
        newest = of_run.order_by(event.c.seq.desc()).limit(1).scalar_subquery()
        row = {**asdict(newer), "position": newest}
        connection.execute(insert(summary).values(row))


def briefs(connection: Connection, version: str) -> dict[RunId, str | None]:
    """Return every run that has events, in the order of their first ones; None where no summary
    holds."""
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
    return {RunId(row.run_id): row.brief for row in connection.execute(query)}


def shown(connection: Connection, run_ids: Collection[RunId]) -> Mapping[RunId, str]:
    """Return the views in the newest summaries of these runs; nothing for a run that has none."""
    wanted = select(summary.c.run_id, summary.c.shown).where(summary.c.run_id.in_(run_ids))
    return {RunId(row.run_id): row.shown for row in connection.execute(wanted)}
