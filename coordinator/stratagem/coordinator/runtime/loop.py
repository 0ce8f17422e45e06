"""The only writer of the journal: command -> decide -> journal (durable) -> apply -> answer.

Commands that wait together share one transaction. Every fact of the state that others read is
durable; start-up is always a replay. If the lead is lost, or the journal cannot be written, the
loop ends with the reason: nothing may be decided after that.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from stratagem.common.base import ids
from stratagem.common.base.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    StaleError,
    StratagemError,
    UnavailableError,
    WrongStateError,
)
from stratagem.common.base.ids import RunId, is_within
from stratagem.common.numerics.verification import VERIFIER
from stratagem.common.observe.metrics import Durations
from stratagem.coordinator.core.apply import CLUSTER, apply
from stratagem.coordinator.core.commands import Command, JournalEntry, Refusal, RefusalKind, Tick
from stratagem.coordinator.core.decide import Agenda, decide, world_of
from stratagem.coordinator.core.fact_text import sentence
from stratagem.coordinator.core.facts import ROOT, ClusterSummed, Fact, RunDeleted, SegmentRefuted
from stratagem.coordinator.core.run_view import RunView, at_rest, put_to_rest
from stratagem.coordinator.core.state import CoordinatorState, EndedRun, RunRecord
from stratagem.coordinator.core.strategy_calls import without_draws
from stratagem.coordinator.core.strategy_contract import Strategies
from stratagem.coordinator.core.world import World
from stratagem.coordinator.observe.logs import ids_of
from stratagem.coordinator.store.fact_log import Committed, Recorded
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.lead import Lead
from stratagem.coordinator.store.snapshot import Snapshot
from stratagem.coordinator.store.step_history import HistoryRow

# ---- Loop ----

APPEND_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.5, 2.0, 10.0)
MAX_BATCH = 64
"""The most commands in one transaction; this bounds the wait of the first command."""

SUMMED_UP_FACTS = 50_000
SUMMED_UP_CLUSTER = 5000
"""The number of cluster facts after which they are replaced by a summary. This bounds how many
facts a takeover reads, and one transaction deletes."""
SUMMED_UP_RUNS = 500
"""Replay summarizes ended runs whenever it has read this many runs (or SUMMED_UP_FACTS facts), so
that an interrupted replay keeps its progress."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Ask:
    command: Command
    answer: "asyncio.Future[tuple[JournalEntry, ...]]"
    histories: Sequence[HistoryRow] = ()


@dataclass(slots=True)
class _Batch:
    """The facts of one transaction, the state after them, and the answers to its commands."""

    state: CoordinatorState
    num_of_cluster: int
    """The number of facts of the cluster itself, which belong to no run."""
    committed: list[Committed] = field(default_factory=list)
    histories: list[HistoryRow] = field(default_factory=list)
    answers: list[tuple[_Ask, tuple[JournalEntry, ...] | StratagemError]] = field(
        default_factory=list
    )

    @property
    def walls_s(self) -> dict[RunId, float]:
        """Return the wall-clock time of each run's newest fact in the batch."""
        return {item.entry.run_id: item.wall_s for item in self.committed}

    @property
    def ends_with_deletion(self) -> bool:
        return any(isinstance(item.entry.fact, RunDeleted) for item in self.committed)


class Loop:
    def __init__(self, journal: Journal, lead: Lead, strategies: Strategies) -> None:
        self.state = CoordinatorState(strategies)
        self._agenda = Agenda(self.state)
        self.world = self._agenda.world
        """The read-only view of the same state that strategies get."""
        self.term = lead.term
        self.clock = LeaderClock(lead.last_time_s)
        self.recorded = Recorded(journal, lead.term)
        self._queue: asyncio.Queue[_Ask] = asyncio.Queue()
        self._in_hand: list[_Ask] = []
        self._between = asyncio.Lock()
        """A lock that is held while a batch is decided and written."""
        self._has_ended = False
        self._num_of_cluster = 0
        self._num_summed_up = 0
        """The number of cluster facts that the latest summary covers."""
        self._is_summing_up = False
        self._deadline: asyncio.TimerHandle | None = None
        self.facts: Counter[str] = Counter()
        """The number of facts journaled since the start, by the keys of `counted_as`."""
        self.append_seconds = Durations(APPEND_BOUNDS_S)
        self.renewed_s = time.monotonic()
        """Monotonic time at which the lead was last confirmed."""

    @property
    def num_waiting(self) -> int:
        """Return the number of commands waiting to be decided."""
        return self._queue.qsize()

    @property
    def cluster_is_long(self) -> bool:
        """Return True if the cluster's facts need a new summary and none is being made."""
        num_facts = self._num_of_cluster - self._num_summed_up
        return num_facts >= SUMMED_UP_CLUSTER and not self._is_summing_up

    async def sum_up_cluster(self) -> None:
        """Replace the cluster's facts, up to the newest durable one, by a summary. Commits wait for
        the transaction only, not for making the summary."""
        if self._is_summing_up or not self._num_of_cluster:
            return  # an older summary must not come after a newer one
        self._is_summing_up = True
        try:
            state, num_facts = self.state, self._num_of_cluster
            await self.recorded.sum_up_cluster(state, num_facts)
            self._num_summed_up = num_facts
        finally:
            self._is_summing_up = False

    async def replay(
        self, show: Callable[[list[Committed]], None], renew_every_s: float = math.inf
    ) -> None:
        """Rebuild the state from the journal: finished runs from their summaries, the others from
        their facts, which are passed to show run by run.

        This may take minutes, in which other tasks run on the event loop, and the lead is renewed.
        """
        resting, others = await self.recorded.runs()
        self.state = await asyncio.to_thread(put_to_rest, self.state, resting)
        num_facts = num_since = 0
        read: dict[RunId, float] = {}
        async for page in self.recorded.pages(others):
            facts = self._folded(page)
            read |= {item.entry.run_id: item.wall_s for item in facts}
            num_facts, num_since = num_facts + len(facts), num_since + len(facts)
            show(facts)
            if self._num_of_cluster - self._num_summed_up >= SUMMED_UP_FACTS:
                await self.sum_up_cluster()
            if num_since >= SUMMED_UP_FACTS or len(read) > SUMMED_UP_RUNS:
                last = facts[-1].entry.run_id  # there may be more of it
                await self._sum_up(
                    {run_id: at_s for run_id, at_s in read.items() if run_id != last}
                )
                read, num_since = {last: read[last]}, 0
            if time.monotonic() - self.renewed_s > renew_every_s:
                await self.renew()
        await self._sum_up(read)
        if self.cluster_is_long:
            await self.sum_up_cluster()
        self._agenda = Agenda(self.state)
        self.world = self._agenda.world
        num_runs = len(self.state.runs) + len(self.state.ended)
        counts = {"facts": num_facts, "runs": num_runs, "summaries": len(resting)}
        log.info("journal replayed", **counts, term=self.term)

    def _folded(self, facts: list[Committed]) -> list[Committed]:
        """Apply facts that were read back; return them with the numbers that readers see."""
        folded = []
        for item in facts:
            run_id = item.entry.run_id
            before = self.state.find(run_id)
            with ids.lifted():
                self.state = apply(self.state, run_id, item.entry.fact, item.time_s)
            if run_id == CLUSTER:
                self._num_of_cluster = item.index + 1
                if isinstance(item.entry.fact, ClusterSummed):
                    self._num_summed_up = self._num_of_cluster
            shown_index = _shown_index(before, self.state.find(run_id))
            folded.append(replace(item, shown_index=shown_index))
        self.world = world_of(self.state)
        return folded

    async def _sum_up(self, walls_s: Mapping[RunId, float]) -> None:
        """Summarize the runs among these that have ended, and finish interrupted deletions of runs.
        All facts of these runs have been read."""
        ended = _at_rest(self.state, self.world, walls_s)
        await self.recorded.append((), ended)
        self.state = put_to_rest(self.state, [run for run, _ in ended])
        for run_id in walls_s:
            if run_id != CLUSTER and self.state.find(run_id) is None:
                await self.recorded.forget(run_id)

    async def submit(
        self, command: Command, histories: Sequence[HistoryRow] = ()
    ) -> tuple[JournalEntry, ...]:
        """Submit a command for decision; return the durable facts that it led to. Raises the error
        of a refusal, and CancelledError once the loop has ended.

        histories: written with the facts, if there are any; they affect no decision.
        """
        ask = _Ask(command, asyncio.get_running_loop().create_future(), histories)
        self._queue.put_nowait(ask)
        if self._has_ended:
            ask.answer.cancel()
        try:
            return await ask.answer
        finally:
            del ask  # an error that is its answer has this frame

    async def snapshot(self) -> tuple[Snapshot, CoordinatorState]:
        """Return a snapshot of the journal between two batches, and the state after its facts."""
        async with self._between:
            return await self.recorded.snapshot(), self.state

    async def run(self, on_change: Callable[[list[Committed]], None]) -> None:
        """Serve commands until cancelled; raises FencedError when the lead is lost.

        on_change is called with every batch after it is durable and applied, on the event loop.
        """
        try:
            await self._serve(on_change)
        finally:
            self._has_ended = True
            for ask in self._in_hand:
                ask.answer.cancel()
            while not self._queue.empty():
                self._queue.get_nowait().answer.cancel()

    async def renew(self) -> None:
        """Confirm that this coordinator leads. Raises FencedError if it does not."""
        await self.recorded.renew()
        self.renewed_s = time.monotonic()

    async def close(self) -> None:
        """Give up the leadership, and close the journal."""
        if self._deadline is not None:
            self._deadline.cancel()
        await self.recorded.close()

    async def _serve(self, on_change: Callable[[list[Committed]], None]) -> None:
        while True:
            asks = self._in_hand = [await self._queue.get()]
            while len(asks) < MAX_BATCH and not self._queue.empty():
                asks.append(self._queue.get_nowait())
            async with self._between:
                await self._answer_all(asks, on_change)

    async def _answer_all(
        self, asks: Sequence[_Ask], on_change: Callable[[list[Committed]], None]
    ) -> None:
        batch = _Batch(self.state, self._num_of_cluster)
        for ask in asks:
            await self._decide(batch, ask)
            if batch.ends_with_deletion:  # the next fact may be of a new run of that name
                await self._commit(batch, on_change)
                batch = _Batch(self.state, self._num_of_cluster)
        await self._commit(batch, on_change)

    async def _decide(self, batch: _Batch, ask: _Ask) -> None:
        try:
            state = await self.recorded.recalled(batch.state, ask.command)
            decision = decide(state, ask.command)
        except StratagemError as error:
            batch.answers.append((ask, error))
            return
        if isinstance(decision, Refusal):
            batch.answers.append((ask, _ERRORS[decision.kind](decision.reason)))
            return
        if decision:
            batch.state = state
            batch.histories += ask.histories
        now_s = self.clock.now()
        for entry in decision:
            self._add(batch, entry, now_s)

        def add(entry: JournalEntry) -> CoordinatorState:
            self._add(batch, entry, now_s)
            return batch.state

        self._agenda.settle(batch.state, now_s, add)
        batch.answers.append((ask, decision))

    def _add(self, batch: _Batch, entry: JournalEntry, now_s: float) -> None:
        run = batch.state.find(entry.run_id)
        index = 0 if run is None else run.num_facts
        if entry.run_id == CLUSTER:
            index = batch.num_of_cluster
            batch.num_of_cluster += 1
        batch.state = apply(batch.state, entry.run_id, entry.fact, now_s)
        self._agenda.note(batch.state, entry.run_id)
        shown_index = _shown_index(run, batch.state.find(entry.run_id))
        item = Committed(entry, index, now_s, time.time(), shown_index=shown_index)
        batch.committed.append(item)

    async def _commit(self, batch: _Batch, on_change: Callable[[list[Committed]], None]) -> None:
        if batch.committed:
            ended = _at_rest(batch.state, self._agenda.world, batch.walls_s)
            began_s = time.perf_counter()
            await self.recorded.append(batch.committed, ended, batch.histories)
            self.append_seconds.add(time.perf_counter() - began_s)
            for item in batch.committed:
                self.facts.update(counted_as(item.entry.fact))
            batch.state = put_to_rest(batch.state, [run for run, _ in ended])
            for run, _ in ended:
                self._agenda.note(batch.state, run.run_id)
        for item in batch.committed:
            if isinstance(item.entry.fact, RunDeleted):
                await self.recorded.forget(item.entry.run_id)
        self.state, self.world = batch.state, self._agenda.world
        self._num_of_cluster = batch.num_of_cluster
        for item in batch.committed:
            fact = item.entry.fact
            say = log.debug if item.shown_index < 0 else log.info
            text = sentence(without_draws(self.state.find(item.entry.run_id), fact))
            say(text, kind=type(fact).__name__, **ids_of(item.entry.run_id, fact))
        if batch.committed:
            on_change(batch.committed)
        for ask, answer in batch.answers:
            _answer(ask, answer)
        self._arm_deadline()

    def _arm_deadline(self) -> None:
        """Set a timer that wakes the loop when the next deadline of any run has passed."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        deadline_s = self._agenda.next_deadline
        if deadline_s is not None:
            delay_s = max(0.0, deadline_s - self.clock.now()) + 0.001
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._queue.put_nowait(_Ask(Tick(), asyncio.get_running_loop().create_future()))


def counted_as(fact: Fact) -> Iterator[str]:
    """Yield the keys under which metrics count a fact: its kind and, for some kinds, a detail."""
    kind = type(fact).__name__
    yield kind
    if isinstance(fact, SegmentRefuted):
        yield f"{kind} {fact.conclusion}"
    elif is_within(getattr(fact, "party", ROOT), VERIFIER):
        yield f"{kind} {VERIFIER}"


def _shown_index(before: RunRecord | EndedRun | None, now: RunRecord | EndedRun | None) -> int:
    """Return the number under which readers see a fact; -1 if the fact is hidden. before, now: its
    run without and with the fact; None if it concerns the cluster, begins the run or deletes it."""
    num_shown = 0 if before is None else before.num_shown
    return -1 if now is not None and now.num_shown == num_shown else num_shown


def _at_rest(
    state: CoordinatorState, world: World, walls_s: Mapping[RunId, float]
) -> list[tuple[EndedRun, RunView]]:
    """Return the runs among these that are at rest (ended and held by no worker), with their views;
    walls_s: time of each run's newest fact."""
    runs = [(state.runs[run_id], at_s) for run_id, at_s in walls_s.items() if run_id in state.runs]
    summaries = (at_rest(world, run, at_s) for run, at_s in runs)
    return [summary for summary in summaries if summary is not None]


_ERRORS = {
    RefusalKind.INVALID: InvalidInputError,
    RefusalKind.NOT_FOUND: NotFoundError,
    RefusalKind.CONFLICT: AlreadyExistsError,
    RefusalKind.PRECONDITION: WrongStateError,
    RefusalKind.NOT_YET: UnavailableError,
    RefusalKind.STALE: StaleError,
}


def _answer(ask: _Ask, answer: tuple[JournalEntry, ...] | StratagemError) -> None:
    if ask.answer.done():
        return
    if isinstance(answer, StratagemError):
        ask.answer.set_exception(answer)
    else:
        ask.answer.set_result(answer)


# ---- Leader's clock ----
#
# All decisions use the leader's clock and no other time.
#
# The clock starts at the last journaled value and advances only while this coordinator leads and
# runs. An outage of any length therefore expires nothing, and neither does a time in which the
# process was frozen (a paused container, a suspended machine): no heartbeat could have arrived.
# The clock does not read the wall clock and cannot jump.

STEP_S: Final = 0.5
"""The most seconds that the clock advances between two readings; a longer gap was a freeze."""


class LeaderClock:
    """The leader clock: counts seconds of leadership since the journal began; each leader has its
    own."""

    def __init__(self, start_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._now_s = start_s
        self._seen_s = monotonic()

    def now(self) -> float:
        """Return the current leader time, in seconds."""
        seen_s = self._monotonic()
        self._now_s += min(seen_s - self._seen_s, STEP_S)
        self._seen_s = seen_s
        return self._now_s

    async def run(self) -> None:
        """Read the clock so often that only freezes are left out, until cancelled."""
        while True:
            self.now()
            await asyncio.sleep(STEP_S / 4)
