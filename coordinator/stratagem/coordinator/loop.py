"""The only writer: command -> decide -> journal (durable) -> apply -> answer.

Commands that wait together share one transaction. The state that others read is always one whose
every fact is durable; start-up is always a replay. When the lead is lost, or the journal cannot be
written, the loop ends and says why: nothing may be decided after that.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import structlog

from stratagem.common import limits
from stratagem.common.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    StaleError,
    StratagemError,
    UnavailableError,
    WrongStateError,
)
from stratagem.common.ids import RunId
from stratagem.common.metrics.definition import Durations
from stratagem.coordinator.clock import LeaderClock
from stratagem.coordinator.core.agenda import Agenda
from stratagem.coordinator.core.apply import apply
from stratagem.coordinator.core.commands import Command, Entry, Refusal, RefusalKind, Tick
from stratagem.coordinator.core.decide import decide, world_of
from stratagem.coordinator.core.facts import SCHEMA_VERSION, RunDeleted, decode, encode
from stratagem.coordinator.core.sentences import sentence
from stratagem.coordinator.core.state import CoordinatorState
from stratagem.coordinator.journal import Journal, Lead, Record
from stratagem.coordinator.watching.log_ids import ids_of

APPEND_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.5, 2.0, 10.0)
MAX_BATCH = 64
"""Commands that share one transaction at most; bounds how long the first one waits."""

PAGE_FACTS = 1000
"""Facts that are read back at once, at the start."""

PAGE_EVENTS = 100
"""Of a run that a watcher asks for at once. One that does not read keeps them, about 2 KB each."""

log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Committed:
    """A durable fact: its number inside its run, and when."""

    entry: Entry
    index: int
    time_s: float
    wall_s: float


@dataclass(slots=True)
class _Ask:
    command: Command
    answer: "asyncio.Future[tuple[Entry, ...]]"


@dataclass(slots=True)
class _Batch:
    """What one transaction will hold, and whom to tell."""

    state: CoordinatorState
    seqs: dict[RunId, int]
    committed: list[Committed] = field(default_factory=list)
    answers: list[tuple[_Ask, tuple[Entry, ...] | StratagemError]] = field(default_factory=list)

    @property
    def ends_with_deletion(self) -> bool:
        return any(isinstance(item.entry.fact, RunDeleted) for item in self.committed)


class Loop:
    def __init__(
        self,
        journal: Journal,
        lead: Lead,
        on_change: Callable[[list[Committed]], None],
    ) -> None:
        """on_change is told of every batch after it is durable and applied, on the event loop."""
        self.state = CoordinatorState()
        self._agenda = Agenda(self.state)
        self.world = self._agenda.world
        """What strategies may look at, of the same state."""
        self.term = lead.term
        self.clock = LeaderClock(lead.last_time_s)
        self._journal = journal
        self._on_change = on_change
        self._queue: asyncio.Queue[_Ask] = asyncio.Queue()
        self._in_hand: list[_Ask] = []
        self._has_ended = False
        self._seqs: dict[RunId, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._deadline: asyncio.TimerHandle | None = None
        self.facts: Counter[str] = Counter()
        """Journaled since the start, by kind."""
        self.append_seconds = Durations(APPEND_BOUNDS_S)
        self.renewed_s = time.monotonic()
        """When the lead was last shown to be ours."""

    @property
    def num_waiting(self) -> int:
        """Commands that wait to be decided."""
        return self._queue.qsize()

    async def replay(self, show: Callable[[list[Committed]], None]) -> None:
        """Rebuild the state from the journal; show is told of the facts in order, by pages."""
        stored = self._journal.replay()
        num_facts = 0
        deleted: set[RunId] = set()
        while page := await self._in_thread(lambda: list(islice(stored, PAGE_FACTS))):
            facts = [_committed(item.record) for item in page]
            for item in facts:
                run_id = item.entry.run_id
                with limits.lifted():
                    self.state = apply(self.state, run_id, item.entry.fact, item.time_s)
                self._seqs[run_id] = item.index + 1
                if isinstance(item.entry.fact, RunDeleted):
                    deleted.add(run_id)
            num_facts += len(facts)
            self.world = world_of(self.state)
            show(facts)
        for run_id in deleted:
            await self._forget(run_id)
        self._agenda = Agenda(self.state)
        self.world = self._agenda.world
        log.info("journal replayed", facts=num_facts, runs=len(self.state.runs), term=self.term)

    async def read(self, run_id: RunId, from_index: int) -> list[Committed]:
        """Some of the durable facts of a run, from a number on; none when there are none."""
        stored = self._journal.read(run_id, from_index, PAGE_EVENTS)
        page = await self._in_thread(lambda: list(islice(stored, PAGE_EVENTS)))
        return await asyncio.to_thread(lambda: [_committed(item.record) for item in page])

    async def submit(self, command: Command) -> tuple[Entry, ...]:
        """Have a command decided; the facts it led to, durable. Raises what it was refused with,
        and CancelledError where the loop has ended."""
        answer: asyncio.Future[tuple[Entry, ...]] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Ask(command, answer))
        if self._has_ended:
            answer.cancel()
        return await answer

    async def run(self) -> None:
        """Serve commands until cancelled; raises FencedError when the lead is lost."""
        try:
            await self._serve()
        finally:
            self._has_ended = True
            for ask in self._in_hand:
                ask.answer.cancel()
            while not self._queue.empty():
                self._queue.get_nowait().answer.cancel()

    async def renew(self) -> None:
        """Show that this coordinator leads. Raises FencedError when it does not."""
        await self._in_thread(lambda: self._journal.renew(self.term))
        self.renewed_s = time.monotonic()

    async def close(self) -> None:
        """Give up the lead and close the journal."""
        if self._deadline is not None:
            self._deadline.cancel()
        await self._in_thread(lambda: self._journal.release(self.term))
        await self._in_thread(self._journal.close)
        self._thread.shutdown()

    async def _serve(self) -> None:
        while True:
            asks = self._in_hand = [await self._queue.get()]
            while len(asks) < MAX_BATCH and not self._queue.empty():
                asks.append(self._queue.get_nowait())
            batch = _Batch(self.state, dict(self._seqs))
            for ask in asks:
                self._decide(batch, ask)
                if batch.ends_with_deletion:  # what comes next may be of a new run of that name
                    await self._commit(batch)
                    batch = _Batch(self.state, dict(self._seqs))
            await self._commit(batch)

    def _decide(self, batch: _Batch, ask: _Ask) -> None:
        try:
            decision = decide(batch.state, ask.command)
        except StratagemError as error:
            batch.answers.append((ask, error))
            return
        if isinstance(decision, Refusal):
            batch.answers.append((ask, _error(decision)))
            return
        now_s = self.clock.now()
        for entry in decision:
            self._add(batch, entry, now_s)

        def add(entry: Entry) -> CoordinatorState:
            self._add(batch, entry, now_s)
            return batch.state

        self._agenda.settle(batch.state, now_s, add)
        batch.answers.append((ask, decision))

    def _add(self, batch: _Batch, entry: Entry, now_s: float) -> None:
        batch.state = apply(batch.state, entry.run_id, entry.fact, now_s)
        self._agenda.note(batch.state, entry.run_id)
        index = batch.seqs.get(entry.run_id, 0)
        batch.seqs[entry.run_id] = index + 1
        batch.committed.append(Committed(entry, index, now_s, time.time()))

    async def _commit(self, batch: _Batch) -> None:
        if batch.committed:
            records = [_record(item) for item in batch.committed]
            began_s = time.perf_counter()
            await self._in_thread(lambda: self._journal.append(self.term, records))
            self.append_seconds.add(time.perf_counter() - began_s)
            self.facts.update(record.kind for record in records)
        for item in batch.committed:
            if isinstance(item.entry.fact, RunDeleted):
                await self._forget(item.entry.run_id)
                batch.seqs.pop(item.entry.run_id, None)
        self.state, self.world = batch.state, self._agenda.world
        self._seqs = batch.seqs
        for item in batch.committed:
            fact = item.entry.fact
            log.info(sentence(fact), kind=type(fact).__name__, **ids_of(item.entry.run_id, fact))
        if batch.committed:
            self._on_change(batch.committed)
        for ask, answer in batch.answers:
            _answer(ask, answer)
        self._arm_deadline()

    async def _forget(self, run_id: RunId) -> None:
        await self._in_thread(lambda: self._journal.delete_run(self.term, run_id))
        self._seqs.pop(run_id, None)

    def _arm_deadline(self) -> None:
        """Wake the loop when a deadline of some run has passed."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        deadline_s = self._agenda.next_deadline
        if deadline_s is not None:
            delay_s = max(0.0, deadline_s - self.clock.now()) + 0.001
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        answer: asyncio.Future[tuple[Entry, ...]] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Ask(Tick(), answer))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _committed(record: Record) -> Committed:
    fact = decode(record.kind, record.schema_version, record.payload)
    entry = Entry(record.run_id, fact)
    return Committed(entry, record.seq, record.time_s, record.wall_s)


def _record(item: Committed) -> Record:
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


def _answer(ask: _Ask, answer: tuple[Entry, ...] | StratagemError) -> None:
    if ask.answer.done():
        return
    if isinstance(answer, StratagemError):
        ask.answer.set_exception(answer)
    else:
        ask.answer.set_result(answer)


def _error(refusal: Refusal) -> StratagemError:
    match refusal.kind:
        case RefusalKind.INVALID:
            return InvalidInputError(refusal.reason)
        case RefusalKind.NOT_FOUND:
            return NotFoundError(refusal.reason)
        case RefusalKind.CONFLICT:
            return AlreadyExistsError(refusal.reason)
        case RefusalKind.PRECONDITION:
            return WrongStateError(refusal.reason)
        case RefusalKind.NOT_YET:
            return UnavailableError(refusal.reason)
        case RefusalKind.STALE:
            return StaleError(refusal.reason)
