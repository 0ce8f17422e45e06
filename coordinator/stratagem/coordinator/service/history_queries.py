"""Answers queries about the step history of runs: what is stored of segments that have ended, and
what is in memory of those in flight.

Decides nothing. Reads segments in pages, between which the journal goes on.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Party, RunId
from stratagem.common.history import Columns, Series, clipped, joined, shortened
from stratagem.common.history.columns import part_of
from stratagem.common.history.recording import is_of_newest_segment, pack_columns, unpack
from stratagem.coordinator.app.app import App
from stratagem.coordinator.core.facts import ROOT
from stratagem.coordinator.observe.live_history import SentRows, rows_in_flight
from stratagem.coordinator.store.journal.history_rows import HistoryRow, behind, cut_to
from stratagem.coordinator.store.journal.step_histories import StepSpan
from stratagem.v1 import coordinator_pb2 as pb

MAX_ROWS: Final = 65_536
"""Of one series in one answer."""
MAX_NAMES: Final = 256
"""Parties, or series, that one request names."""
MESSAGE_ROWS: Final = 16_384
"""Of one message: fewer bytes than the largest message has, also where nothing is compressed."""


@dataclass(slots=True)
class _Gathered:
    """The rows of one party, by series, as they are read."""

    ended: dict[Series, list[Columns]] = field(default_factory=dict)
    in_flight: dict[Series, Columns] = field(default_factory=dict)
    stride: int = 1
    last_segment: int = -1
    """The newest segment that has ended."""


@dataclass(frozen=True, slots=True)
class HistoryQueries:
    """Queries of one app."""

    app: App

    async def blocks(
        self, request: pb.GetHistoryRequest, root_segment: int
    ) -> AsyncIterator[pb.HistoryBlock]:
        """Yield the rows that a request asks for, party by party and series by series.

        root_segment: the newest one that the run has trained; what is stored behind it was trained
        before the run returned to an earlier commit.
        """
        _check(request)
        run_id = RunId(request.run_id)
        stored = await self.app.loop.recorded.history_parties(run_id)
        known = sorted({*stored, *self.app.history.parties(run_id)})
        for party in known:
            if not _is_wanted(party, request.parties or [ROOT]):
                continue
            limit = root_segment if _counts_as_root(party) else None
            gathered = await self._read(request, party, limit)
            sent = self.app.history.sent(run_id, party)
            await asyncio.to_thread(_add_tail, gathered, sent, request.series)
            for series in sorted({*gathered.ended, *gathered.in_flight}):
                for block in await asyncio.to_thread(_blocks, request, party, series, gathered):
                    yield block

    async def _read(
        self, request: pb.GetHistoryRequest, party: Party, limit: int | None
    ) -> _Gathered:
        gathered, last, step = _Gathered(), -1, 0
        run_id, span = RunId(request.run_id), _span_of(request)
        while page := await self.app.loop.recorded.history(run_id, party, span, last):
            last = page[-1].segment
            kept = page if limit is None else await asyncio.to_thread(_up_to, limit, page)
            if kept and is_of_newest_segment(party):
                kept = kept[-1:]
                gathered.ended.clear()
            for row, rows in zip(kept, await asyncio.to_thread(_unpacked, kept), strict=True):
                for series, columns in rows.items():
                    if _is_wanted(series.name, request.series or ["*"]):
                        # What was read before may have been merged with what follows since.
                        its = gathered.ended.setdefault(series, [])
                        its.append(behind(columns, step) if row.from_step < step else columns)
                step = max(step, row.to_step)
            gathered.stride = max([gathered.stride, *(row.stride for row in kept)])
            gathered.last_segment = max([gathered.last_segment, *(row.segment for row in kept)])
        return gathered


def _counts_as_root(party: Party) -> bool:
    """Return whether segments of a party are those of the root."""
    return party == ROOT or party.partition("/")[0] in ("actions", "node", "replica", "stage")


def _up_to(segment: int, rows: Sequence[HistoryRow]) -> list[HistoryRow]:
    cut = (cut_to(row, segment) for row in rows)
    return [row for row in cut if row is not None]


def _add_tail(gathered: _Gathered, sent: Sequence[SentRows], wanted: Sequence[str]) -> None:
    """Add what the segment in flight has recorded; it may have ended while the rest was read."""
    if not sent or sent[0].segment <= gathered.last_segment:
        return
    gathered.stride = max([gathered.stride, *(each.stride for each in sent)])
    gathered.in_flight = {
        series: columns
        for series, columns in rows_in_flight(sent).items()
        if _is_wanted(series.name, wanted or ["*"])
    }


def _span_of(request: pb.GetHistoryRequest) -> StepSpan:
    return StepSpan(max(request.from_step, 1), request.to_step or None)


def _unpacked(rows: Sequence[HistoryRow]) -> list[dict[Series, Columns]]:
    return [unpack(row.rows) for row in rows]


def _check(request: pb.GetHistoryRequest) -> None:
    for name in ("parties", "series"):
        given = getattr(request, name)
        if len(given) > MAX_NAMES or any(len(each) > MAX_NAMES for each in given):
            text = f"at most {MAX_NAMES} names, each of at most {MAX_NAMES} characters"
            raise InvalidInputError.at(name, text)
    if request.max_rows > MAX_ROWS:
        raise InvalidInputError.at("max_rows", f"{request.max_rows} is over {MAX_ROWS}")
    if request.to_step and request.to_step < request.from_step:
        raise InvalidInputError.at("to_step", f"{request.to_step} is before from_step")


def _is_wanted(name: str, wanted: Sequence[str]) -> bool:
    """Return whether a name is among those wanted, or begins as one of them that ends in "*"."""
    return any(
        name.startswith(each[:-1]) if each.endswith("*") else name == each for each in wanted
    )


def _blocks(
    request: pb.GetHistoryRequest, party: Party, series: Series, gathered: _Gathered
) -> list[pb.HistoryBlock]:
    stride, max_rows, span = gathered.stride, request.max_rows or MAX_ROWS, _span_of(request)
    whole = {
        False: joined(gathered.ended.get(series, []), stride),
        True: joined([gathered.in_flight[series]] if series in gathered.in_flight else [], stride),
    }
    whole = {
        provisional: clipped(rows, stride, span.from_step, span.to_step)
        for provisional, rows in whole.items()
    }
    _, stride = shortened(joined([*whole.values()], stride), stride, max_rows)
    return [
        pb.HistoryBlock(
            party=party,
            series=series.name,
            stride=stride,
            observed=series.observed,
            provisional=provisional,
            columns=pack_columns(part),
        )
        for provisional, rows in whole.items()
        for part in _pieces(joined([rows], stride))
    ]


def _pieces(columns: Columns) -> Iterator[Columns]:
    for start in range(0, len(columns), MESSAGE_ROWS):
        yield part_of(columns, start, start + MESSAGE_ROWS)
