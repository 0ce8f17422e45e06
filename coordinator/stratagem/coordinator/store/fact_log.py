"""Read and write the journal as facts and summaries, in a thread of its own.

One thread at a time uses the journal. The loop decides what is written.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, islice
from typing import Final, TypeVar

from pydantic import TypeAdapter
from sqlalchemy import Connection

from stratagem.common.base import ids
from stratagem.common.base.ids import Party, RunId
from stratagem.coordinator.core.apply import CLUSTER
from stratagem.coordinator.core.commands import Command, EventSpan, JournalEntry
from stratagem.coordinator.core.fact_text import SCHEMA_VERSION, decode, encode, payload_now
from stratagem.coordinator.core.facts import RunResumed
from stratagem.coordinator.core.retention import summary_of
from stratagem.coordinator.core.run_view import RunView, num_to_recall, recall
from stratagem.coordinator.core.state import CoordinatorState, EndedRun, RunRecord
from stratagem.coordinator.store import step_history
from stratagem.coordinator.store.journal import Journal, Record, RunSummary
from stratagem.coordinator.store.snapshot import Snapshot
from stratagem.coordinator.store.step_history import HistoryRow, StepSpan, one_row

# ---- Rows ----
#
# Facts and summaries are converted to rows of the journal, and back.

_brief: Final = TypeAdapter(EndedRun)


def _version() -> str:
    """Return the version of summaries: the program's version, and the schema of summaries, which
    may change between releases."""
    shapes = json.dumps([_brief.json_schema(), RunView.model_json_schema()], sort_keys=True)
    return f"{version('stratagem')[:40]} {hashlib.sha256(shapes.encode()).hexdigest()[:16]}"


VERSION: Final = _version()
"""The version of the summaries that this program can read; others are made again from the facts."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A durable fact, with its number inside its run and its time."""

    entry: JournalEntry
    index: int
    time_s: float
    wall_s: float
    payload: str = ""
    """The fact as JSON if it was read for display; else ""."""
    shown_index: int = -1
    """The number of the fact among the facts shown to readers of its run; -1 if it is hidden, or
    not counted."""


def committed(record: Record) -> Committed:
    """Convert a row of the journal to the fact that it holds."""
    fact = decode(record.kind, record.schema_version, record.payload)
    return Committed(JournalEntry(record.run_id, fact), record.seq, record.time_s, record.wall_s)


def shown_fact(record: Record) -> Committed:
    """Convert a row of the journal to its fact, and keep the JSON for display."""
    fact = decode(record.kind, record.schema_version, record.payload)
    payload, entry = (
        payload_now(record.kind, fact, record.payload),
        JournalEntry(record.run_id, fact),
    )
    return Committed(entry, record.seq, record.time_s, record.wall_s, payload)


def record(item: Committed) -> Record:
    """Convert a fact to a row of the journal."""
    kind, payload = encode(item.entry.fact)
    return Record(
        run_id=item.entry.run_id,
        seq=item.index,
        kind=kind,
        schema_version=SCHEMA_VERSION,
        payload=payload,
        time_s=item.time_s,
        wall_s=item.wall_s,
        idem_key=item.entry.key,
    )


def summary(run: EndedRun, run_view: RunView) -> RunSummary:
    """Return the journal's summary of a run at rest: it has ended, with no pending work."""
    brief = _brief.dump_json(run).decode()
    return RunSummary(run.run_id, VERSION, brief, run_view.model_dump_json())


def view_of(text: str) -> RunView:
    """Parse the view in the summary of a run at rest, i.e. ended and archived."""
    return RunView.model_validate_json(text)


# ---- Log ----

PAGE_FACTS = 1000
"""The number of facts read at once during replay."""

PAGE_SEGMENTS = 64
"""The number of rows of the step history read at once."""

MERGED_SEGMENTS = 64
"""The number of single-segment rows of the step history that are merged into one row."""

T = TypeVar("T")


class Recorded:
    """The facts and summaries of a journal, for the coordinator of one leadership term."""

    def __init__(self, journal: Journal, term: int) -> None:
        self._journal = journal
        self._term = term
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")

    async def renew(self) -> None:
        """Renew the lease. Raises FencedError if this coordinator no longer leads."""
        await self._in_thread(lambda: self._journal.renew(self._term))

    async def close(self) -> None:
        """Release the lead and close the journal."""
        await self._in_thread(lambda: self._journal.release(self._term))
        await self._in_thread(self._journal.close)
        self._thread.shutdown()

    async def append(
        self,
        facts: Sequence[Committed],
        at_rest: Sequence[tuple[EndedRun, RunView]],
        histories: Sequence[HistoryRow] = (),
    ) -> None:
        """Make facts durable in one transaction, with summaries of runs that are at rest (archived)
        now, and the step history of segments that ended. If a run returns to an earlier commit, its
        history after that commit is deleted."""
        records = [record(item) for item in facts]
        summaries = [summary(run, view) for run, view in at_rest]
        returns = {
            item.entry.run_id: fact.from_segment
            for item in facts
            if isinstance(fact := item.entry.fact, RunResumed) and fact.from_segment is not None
        }
        await self._in_thread(
            lambda: self._journal.append(self._term, records, summaries, histories, returns)
        )

    async def sum_up_cluster(self, state: CoordinatorState, num_facts: int) -> None:
        """Replace the cluster's first num_facts facts, all durable, by a summary of the state after
        them. Raises FencedError."""

        def made() -> list[Record]:
            parts = list(summary_of(state))
            numbered = enumerate(parts, num_facts - len(parts))
            # Times are those of the facts in whose places they stand.
            return [
                record(Committed(JournalEntry(CLUSTER, part), number, 0.0, 0.0))
                for number, part in numbered
            ]

        records = await asyncio.to_thread(made)
        await self._in_thread(lambda: self._journal.sum_up(self._term, records))

    async def snapshot(self) -> Snapshot:
        """Return a snapshot of the journal as it is now."""
        return await self._in_thread(self._journal.snapshot)

    async def forget(self, run_id: RunId) -> None:
        """Delete everything that the journal holds about a run."""
        await self._in_thread(lambda: self._journal.delete_run(self._term, run_id))

    async def runs(self) -> tuple[list[EndedRun], list[RunId]]:
        """Return the runs that have summaries, and the runs whose facts must be read. The cluster
        comes first, because the display of a run depends on the workers."""
        briefs = await self._in_thread(lambda: self._journal.briefs(VERSION))
        ended = [_brief.validate_json(brief) for brief in briefs.values() if brief is not None]
        others = [run_id for run_id, brief in briefs.items() if brief is None]
        return ended, sorted(others, key=lambda run_id: run_id != CLUSTER)

    async def pages(self, run_ids: Iterable[RunId]) -> AsyncIterator[list[Committed]]:
        """Yield all facts of these runs in pages, one run after the other."""
        stored = chain.from_iterable(map(self._journal.read, run_ids))
        while page := await self._in_thread(lambda: list(islice(stored, PAGE_FACTS))):
            yield [committed(item.record) for item in page]

    async def read(self, run_id: RunId, span: EventSpan, num_facts: int) -> list[Committed]:
        """Return the first num_facts facts in a span of a run; empty if there are none."""
        page = await self._in_thread(
            lambda: self._journal.page(
                run_id,
                span.from_index,
                span.before_index,
                num_rows=num_facts,
                kinds=span.kinds,
                newest_first=span.newest_first,
            )
        )
        return await asyncio.to_thread(lambda: [shown_fact(item.record) for item in page])

    async def views(self, run_ids: Collection[RunId]) -> dict[RunId, RunView]:
        """Return the views of those runs that are still at rest."""
        texts = await self._in_thread(lambda: self._journal.shown(run_ids))
        return {run_id: view_of(text) for run_id, text in texts.items()}

    async def history_parties(self, run_id: RunId) -> list[Party]:
        """Return the parties of a run that have a step history."""
        return await self._ask(lambda connection: step_history.parties(connection, run_id))

    async def history(
        self, run_id: RunId, party: Party, span: StepSpan, behind: int
    ) -> list[HistoryRow]:
        """Return the next page of a party's step history: rows after segment `behind` with steps of
        the span; empty at the end.

        Commits wait meanwhile, so only one page is read at once.
        """
        limit = PAGE_SEGMENTS
        return await self._ask(
            lambda connection: step_history.page(connection, run_id, party, span, behind, limit)
        )

    async def unmerged_histories(self) -> set[RunId]:
        """Return the runs in which some party's step history has several rows."""
        return await self._ask(step_history.unmerged_runs)

    async def merge_history(self, run_id: RunId, *, has_ended: bool) -> None:
        """Merge the rows of a run's step history: MERGED_SEGMENTS into one, and after its end as
        many as one row can hold. Commits wait for reads and writes, not for the merging itself."""
        for party in await self._ask(
            lambda connection: step_history.full_parties(connection, run_id, MERGED_SEGMENTS)
        ):
            while await self._merge_singles(run_id, party):
                pass
        if has_ended:
            counts = await self._ask(lambda connection: step_history.counts(connection, run_id))
            for party, num_rows in counts.items():
                await self._merge_all(run_id, party, num_rows)

    async def _merge_singles(self, run_id: RunId, party: Party) -> bool:
        rows = await self._ask(
            lambda connection: step_history.single_rows(connection, run_id, party, MERGED_SEGMENTS)
        )
        return len(rows) == MERGED_SEGMENTS and await self._merge(rows)

    async def _merge_all(self, run_id: RunId, party: Party, num_rows: int) -> None:
        rows: list[HistoryRow] = []
        last = -1
        while len(rows) < num_rows:
            page = await self.history(run_id, party, StepSpan(), last)
            if not page:
                break
            rows, last = [*rows, *page], page[-1].segment
        while len(rows) > 1:
            num = len(rows)
            while not await self._merge(rows[:num]) and num > 1:
                num //= 2  # together they are more than one can hold
            rows = rows[num:]

    async def _merge(self, rows: Sequence[HistoryRow]) -> bool:
        """Merge these rows into one; return False if that is impossible."""
        if len(rows) < 2:
            return False
        into = await asyncio.to_thread(one_row, rows)
        if into is None:
            return False
        return await self._in_thread(lambda: self._journal.merge_histories(self._term, rows, into))

    async def recalled(self, state: CoordinatorState, command: Command) -> CoordinatorState:
        """Return the state, extended by the facts that a command needs of a run at rest."""
        wanted = num_to_recall(state, command)
        if wanted is None:
            return state
        return await self._rebuilt(state, *wanted)

    async def run(self, state: CoordinatorState, run_id: RunId) -> RunRecord | None:
        """Rebuild an archived run from its facts; None if it is not, or no longer, archived."""
        resting = state.ended.get(run_id)
        if resting is None:
            return None
        return (await self._rebuilt(state, run_id, resting.num_facts)).runs.get(run_id)

    async def _rebuilt(
        self, state: CoordinatorState, run_id: RunId, num_facts: int
    ) -> CoordinatorState:
        """Return the state after rebuilding an archived run from its first num_facts facts."""

        def read() -> CoordinatorState:
            stored = self._journal.read(run_id, 0, min(num_facts, PAGE_FACTS))
            facts = (committed(item.record) for item in islice(stored, num_facts))
            with ids.lifted():
                return recall(state, run_id, ((item.entry.fact, item.time_s) for item in facts))

        return await self._in_thread(read)

    async def _ask(self, query: Callable[[Connection], T]) -> T:
        return await self._in_thread(lambda: self._journal.ask(query))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
