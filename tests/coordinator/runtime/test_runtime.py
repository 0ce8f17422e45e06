"""The parts of the coordinator's shell that need an event loop but no worker."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from stratagem.common.base.errors import StaleError
from stratagem.common.base.ids import Digest, Incarnation, Party, RunId, WorkerId
from stratagem.coordinator.core.effects import (
    Base,
    Build,
    CommitSegment,
    Effect,
    EvaluateState,
    ExchangeMethod,
    RunSegment,
)
from stratagem.coordinator.core.event_span import EventSpan
from stratagem.coordinator.core.facts import Member, RunFailed, RunReleased
from stratagem.coordinator.core.state import RunPhase
from stratagem.coordinator.observe.event_feed import MAX_EVENTS, Feed, FeedEvent, SegmentProgress
from stratagem.coordinator.observe.run_logs import RunLogLine, RunLogs
from stratagem.coordinator.observe.waiting_reasons import say_what_fails
from stratagem.coordinator.runtime import effect_supervisor as supervisor_module
from stratagem.coordinator.runtime.effect_supervisor import TROUBLE, RunSupervisor
from stratagem.coordinator.runtime.heartbeat_leases import Leases
from stratagem.coordinator.runtime.leader_clock import STEP_S, LeaderClock
from stratagem.coordinator.runtime.rendezvous import Arrival, Barriers
from stratagem.coordinator.runtime.throttle import Paced
from tests.patience import PATIENCE_S

RUN = RunId("run-1")
ROOT = Party("")


def member(name: str) -> Member:
    return Member(worker_id=WorkerId(name), incarnation=Incarnation(name))


def segment(run: str, *names: str, number: int = 1, membership: int = 1) -> RunSegment:
    members = tuple(member(name) for name in names)
    return RunSegment(
        run_id=RunId(run),
        party=ROOT,
        membership=membership,
        segment=number,
        to_step=10,
        base=Base(0, 0, Digest("d")),
        lineage=0,
        members=members,
        num_shards=2,
        exchange=ExchangeMethod.ALL_REDUCE,
        parts=(members,),
        ranks=(),
        evaluate=(),
    )


# ---- supervisor ----


class Performed:
    """Effects that were started and not cancelled."""

    def __init__(self) -> None:
        self.running: set[Effect] = set()
        self.changed = asyncio.Event()

    async def __call__(self, effect: Effect) -> None:
        self.running.add(effect)
        self.changed.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.running.discard(effect)
            self.changed.set()

    async def until(self, expected: set[Effect]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.running != expected:
                self.changed.clear()
                await self.changed.wait()


async def test_supervisor_runs_what_is_due_and_nothing_else() -> None:
    performed = Performed()
    supervisor = RunSupervisor(performed)
    first, second = segment("x", "a", "b"), segment("y", "b", "c")
    supervisor.reconcile(frozenset({first}))
    supervisor.reconcile(frozenset({first, second}))
    await performed.until({first})
    assert supervisor.num_waiting == 1
    supervisor.reconcile(frozenset({second}))
    await performed.until({second})
    await supervisor.close()
    assert performed.running == set()


async def test_supervisor_lets_a_reformed_party_keep_its_turn() -> None:
    performed = Performed()
    supervisor = RunSupervisor(performed)
    before, rival = segment("x", "a", "b"), segment("y", "a")
    supervisor.reconcile(frozenset({before}))
    supervisor.reconcile(frozenset({before, rival}))
    after = segment("x", "a", membership=2)
    supervisor.reconcile(frozenset({after, rival}))
    await performed.until({after})
    await supervisor.close()


async def test_effect_that_yields_its_slots_lets_the_next_one_start() -> None:
    performed = Performed()
    supervisor = RunSupervisor(performed)
    first, second = segment("x", "a"), segment("y", "a")
    supervisor.reconcile(frozenset({first, second}))
    await performed.until({first})
    supervisor.yield_slots(first)
    await performed.until({first, second})
    await supervisor.close()


async def test_failing_effect_is_tried_again() -> None:
    attempts: list[Effect] = []
    done = asyncio.Event()

    async def fail_twice(effect: Effect) -> None:
        attempts.append(effect)
        if len(attempts) < 3:
            raise StaleError("not yet")
        done.set()

    supervisor = RunSupervisor(fail_twice)
    effect = CommitSegment(RUN, ROOT, 1, 10, 1, ((member("a"),),))
    supervisor.reconcile(frozenset({effect}))
    async with asyncio.timeout(PATIENCE_S):
        await done.wait()
    await supervisor.close()
    assert attempts == [effect] * 3


async def test_watchers_are_told_what_keeps_failing() -> None:
    async def no_history(run_id: RunId, span: EventSpan) -> list[FeedEvent]:
        return []

    feed, told = Feed(no_history), asyncio.Event()
    feed.add_event(RUN, FeedEvent(0, 0.0, RunReleased(), RunPhase.RUNNING), is_last=False)

    async def fail(effect: Effect) -> None:
        raise ZeroDivisionError("a defect")

    def on_trouble(effect: Effect, reason: str) -> None:
        say_what_fails(feed, effect, reason)
        told.set()

    supervisor = RunSupervisor(fail, on_trouble)
    build = Build(RUN, ROOT, 1, member("a"))
    supervisor.reconcile(frozenset({build}))
    async with asyncio.timeout(PATIENCE_S):
        await told.wait()
    await supervisor.close()
    shown = feed.progress(RUN)
    assert supervisor.num_failures["Build"] == TROUBLE
    assert shown is not None
    assert shown.reason == (
        "Build on a keeps failing and is tried again: ZeroDivisionError: a defect "
        "(the log of a says more)"
    )
    feed.set_progress(RUN, SegmentProgress(5, 0.1, 1.0))  # it trains on meanwhile
    assert feed.trouble(RUN) == shown.reason
    feed.add_event(RUN, FeedEvent(1, 0.0, RunReleased(), RunPhase.RUNNING), is_last=False)
    assert feed.trouble(RUN) == ""


async def test_effect_that_fails_while_it_is_cancelled_is_not_tried_again() -> None:
    attempts: list[asyncio.Task[None]] = []
    begun = asyncio.Event()

    async def fail_at_the_end(effect: Effect) -> None:
        this = asyncio.current_task()
        assert this is not None
        attempts.append(this)
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise StaleError("what a TaskGroup makes of both") from None

    supervisor = RunSupervisor(fail_at_the_end)
    supervisor.reconcile(frozenset({segment("x", "a")}))
    await begun.wait()
    supervisor.reconcile(frozenset())
    await asyncio.wait(attempts, timeout=PATIENCE_S)
    assert [task.cancelled() for task in attempts] == [True]


class Lingering:
    """An effect that cleans up, until it may end."""

    def __init__(self) -> None:
        self.has_begun, self.cleans_up, self.may_end = (asyncio.Event() for _ in range(3))
        self.has_ended = False

    async def __call__(self, effect: Effect) -> None:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cleans_up.set()
            await self.may_end.wait()
            self.has_ended = True


@pytest.mark.parametrize("is_due", [True, False])
async def test_a_closed_supervisor_has_nothing_running(is_due: bool) -> None:
    lingering = Lingering()
    supervisor = RunSupervisor(lingering)
    supervisor.reconcile(frozenset({segment("x", "a")}))
    await lingering.has_begun.wait()
    if not is_due:
        supervisor.reconcile(frozenset())
    closing = asyncio.create_task(supervisor.close())
    await lingering.cleans_up.wait()
    assert not closing.done()
    lingering.may_end.set()
    await closing
    assert lingering.has_ended


async def test_an_effect_that_does_not_end_is_named_and_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_S", 0.01)
    lingering = Lingering()
    supervisor = RunSupervisor(lingering)
    supervisor.reconcile(frozenset({segment("x", "a")}))
    await lingering.has_begun.wait()
    with capture_logs() as said:
        await supervisor.close()
    assert [(each["event"], each["effect"]) for each in said] == [
        ("effect does not end", "RunSegment x")
    ]
    (left,) = [task for task in asyncio.all_tasks() if task.get_name() == "RunSegment x"]
    lingering.may_end.set()
    await asyncio.wait([left])


def test_effects_that_need_no_compute_have_no_slots() -> None:
    from stratagem.coordinator.core.effects import slots

    assert slots(CommitSegment(RUN, ROOT, 1, 10, 1, ((member("a"),),))) == frozenset()
    evaluate = EvaluateState(RUN, ROOT, 0, Base(0, 0, Digest("d")), ("test",), (member("a"),))
    assert slots(evaluate) == {member("a")}


# ---- barrier ----


async def test_barrier_answers_everybody_in_order_of_rank() -> None:
    barriers = Barriers(lambda run, party: (3, 2))
    arrivals = [Arrival(b"zero", 5, "h:0"), Arrival(b"one", None, "h:1")]
    answers = await asyncio.gather(
        barriers.join(RUN, ROOT, 3, 1, arrivals[1]),
        barriers.join(RUN, ROOT, 3, 0, arrivals[0]),
    )
    assert list(answers) == [tuple(arrivals), tuple(arrivals)]


async def test_barrier_of_another_membership_is_stale_also_while_waiting() -> None:
    current = [(3, 2)]
    barriers = Barriers(lambda run, party: current[0])
    with pytest.raises(StaleError, match="membership 2 is not the current one"):
        await barriers.join(RUN, ROOT, 2, 0, Arrival(b"", 0, ""))
    waiting = asyncio.create_task(barriers.join(RUN, ROOT, 3, 0, Arrival(b"", 0, "")))
    await asyncio.sleep(0)
    assert barriers.missing(RUN, ROOT, 3) == (1,)
    current[0] = (4, 1)
    barriers.drop_stale()
    with pytest.raises(StaleError):
        await waiting


async def test_member_that_calls_again_is_counted_once() -> None:
    barriers = Barriers(lambda run, party: (1, 2))
    lost = asyncio.create_task(barriers.join(RUN, ROOT, 1, 0, Arrival(b"old", 0, "")))
    await asyncio.sleep(0)
    lost.cancel()
    again = asyncio.create_task(barriers.join(RUN, ROOT, 1, 0, Arrival(b"new", 0, "")))
    await asyncio.sleep(0)
    answer = await barriers.join(RUN, ROOT, 1, 1, Arrival(b"one", 0, ""))
    assert [a.endpoint for a in answer] == [b"new", b"one"]
    assert await again == answer


# ---- leases ----


async def test_silent_member_is_lost_and_a_beating_one_is_not() -> None:
    now = [0.0]
    lost: list[tuple[Member, str]] = []
    told = asyncio.Event()

    async def lose(who: Member, reason: str) -> None:
        lost.append((who, reason))
        told.set()

    leases = Leases(10.0, lambda: now[0], lose)
    leases.grant([member("a"), member("b")])
    now[0] = 6.0
    assert leases.renew(member("b"))
    now[0] = 10.0
    watching = asyncio.create_task(leases.expire())
    async with asyncio.timeout(PATIENCE_S):
        await told.wait()
    watching.cancel()
    assert lost == [(member("a"), "no heartbeat for 10 s")]
    assert not leases.renew(member("a"))
    assert leases.silent_s(member("b")) == 4.0


async def test_no_lease_runs_while_the_process_is_frozen() -> None:
    ttl_s = 2 * STEP_S
    lost: list[tuple[Member, float]] = []
    told = asyncio.Event()

    async def lose(who: Member, reason: str) -> None:
        lost.append((who, time.monotonic()))
        told.set()

    clock = LeaderClock(0.0)
    leases = Leases(ttl_s, clock.now, lose)
    granted_s = time.monotonic()
    leases.grant([member("a")])
    watching = asyncio.gather(leases.expire(), clock.run())
    await asyncio.sleep(0)  # it watches
    frozen_s = time.monotonic()
    time.sleep(2 * ttl_s)  # noqa: ASYNC251  (frozen)
    frozen_s = time.monotonic() - frozen_s
    async with asyncio.timeout(PATIENCE_S):
        await told.wait()
    watching.cancel()
    ((who, lost_at_s),) = lost
    assert who == member("a")
    # All time but the freeze, of which the clock counts one step at most, and rounding.
    assert lost_at_s - granted_s - frozen_s >= ttl_s - STEP_S - 1e-6


async def test_no_lease_ends_while_nobody_can_be_heard() -> None:
    lost: list[Member] = []
    has_lost = asyncio.Event()

    async def lose(who: Member, reason: str) -> None:
        lost.append(who)
        has_lost.set()

    now_s = 0.0
    leases = Leases(0.05, lambda: now_s, lose)
    leases.grant([member("a"), member("b")])
    leases.suspend()
    now_s = 100.0
    expiring = asyncio.create_task(leases.expire())
    await asyncio.sleep(0)
    assert lost == []
    leases.resume()
    now_s = 100.04
    assert leases.renew(member("a"))
    now_s = 100.06
    async with asyncio.timeout(PATIENCE_S):
        await has_lost.wait()
    expiring.cancel()
    assert lost == [member("b")]


# ---- feed and logs ----


async def test_watcher_gets_events_from_its_index_then_progress_then_the_end() -> None:
    fact = RunReleased()
    last = FeedEvent(3, 3.0, fact, RunPhase.COMPLETED)

    async def history(run_id: RunId, span: EventSpan) -> list[FeedEvent]:
        assert (span.from_index, span.before_index) == (3, 4), "only what is no longer in memory"
        return [last]

    feed = Feed(history)
    for index in range(3):
        event = FeedEvent(index, float(index), fact, RunPhase.RUNNING)
        feed.add_event(RUN, event, is_last=False)
    seen: list[FeedEvent | SegmentProgress] = []

    async def watch() -> None:
        async for item in feed.watch(RUN, EventSpan(1), 3):
            seen.append(item)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    progress = SegmentProgress(5, 0.5, 100.0)
    feed.set_progress(RUN, progress)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert feed.newest(RUN, lambda each: isinstance(each, RunReleased)) == fact
    assert feed.newest(RUN, lambda each: isinstance(each, RunFailed)) is None
    feed.add_event(RUN, last, is_last=True)
    async with asyncio.timeout(PATIENCE_S):
        await watching
    indices = [item.index for item in seen if isinstance(item, FeedEvent)]
    assert indices == [1, 2, 3]
    assert progress in seen
    assert feed.last_wall_s(RUN) == 3.0


async def test_a_watcher_reads_what_memory_no_longer_holds_from_the_journal() -> None:
    """More events than are kept, an ended run, and one that is deleted under its watcher."""
    total = 2 * MAX_EVENTS + 1  # as many more as it takes to have them cut
    events = [FeedEvent(n, 0.0, RunReleased(), RunPhase.RUNNING) for n in range(total)]
    asked: list[int] = []

    async def history(run_id: RunId, span: EventSpan) -> list[FeedEvent]:
        asked.append(span.from_index)
        found = events[span.from_index : span.before_index]
        return [] if run_id == "gone" else [e for e in found if span.wants(e.kind)][:5]

    feed = Feed(history)
    for name in (RUN, RunId("gone")):
        for event in events:
            feed.add_event(name, event, is_last=False)
    watcher = feed.watch(RUN, EventSpan(0), total)
    seen = [await anext(watcher) for _ in range(total)]
    assert seen == events
    assert asked == list(range(0, total - MAX_EVENTS, 5)), "the newest ones are in memory"
    feed.add_event(RUN, FeedEvent(total, 0.0, RunReleased(), RunPhase.COMPLETED), is_last=True)
    asked.clear()
    assert [item async for item in feed.watch(RUN, EventSpan(total - 3), total + 1)] == events[-3:]
    assert asked == [total - 3, total], "nothing of an ended run is kept"
    assert [item async for item in feed.watch(RunId("gone"), EventSpan(0), total)] == []


async def test_a_watcher_of_some_kinds_skips_the_others_in_the_journal_and_in_memory() -> None:
    facts = [RunFailed(reason="x") if n % 700 == 3 else RunReleased() for n in range(2200)]
    events = [FeedEvent(n, 0.0, fact, RunPhase.RUNNING) for n, fact in enumerate(facts)]
    num_asked = 0

    async def history(run_id: RunId, span: EventSpan) -> list[FeedEvent]:
        nonlocal num_asked
        num_asked += 1
        found = [e for e in events[span.from_index : span.before_index] if span.wants(e.kind)]
        return found[::-1][:2] if span.newest_first else found[:2]

    feed = Feed(history)
    for event in events:
        feed.add_event(RUN, event, is_last=False)
    wanted = [event for event in events if event.kind == "RunFailed"]
    failed = EventSpan(kinds=frozenset({"RunFailed"}))
    watcher = feed.watch(RUN, failed, len(events))
    assert [await anext(watcher) for _ in wanted] == wanted
    assert num_asked == 2, "what does not match is not read: events 3 and 703, and that is all"
    assert feed.progress(RUN) is None
    feed.set_progress(RUN, SegmentProgress(5))
    assert await anext(watcher) == SegmentProgress(5)
    backwards = [e async for e in feed.past(RUN, replace(failed, newest_first=True))]
    assert backwards == wanted[::-1]
    assert [e async for e in feed.past(RUN, replace(failed, from_index=704))] == wanted[2:]


async def test_a_long_log_is_read_in_pieces(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path)
    texts = [f"{n} " + "x" * 8000 for n in range(100)]
    for text in texts:
        logs.add(RUN, RunLogLine(1.0, "", "INFO", text))
    lines = logs.tail(RUN, follow=False, is_over=lambda _: True)
    assert [line.text async for _, line in lines] == texts
    for first in (0, 31, 32, 33, 99, 100, 1000):  # 32 lines fit into what is read at once
        tail = logs.tail(RUN, first, follow=False, is_over=lambda _: True)
        assert [(n, line.text) async for n, line in tail] == list(enumerate(texts))[first:]
        tail = logs.tail(RUN, -first or 100, follow=False, is_over=lambda _: True)
        assert [line.text async for _, line in tail] == (texts[-first:] if first else [])
    none = logs.tail(RunId("none"), -3, follow=False, is_over=lambda _: True)
    assert [line async for line in none] == []
    logs.close()


async def test_log_is_followed_until_the_run_is_over(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path)
    over = [False]
    logs.add(RUN, RunLogLine(1.0, "", "INFO", "first"))
    texts: list[str] = []

    async def follow() -> None:
        async for _, line in logs.tail(RUN, follow=True, is_over=lambda run: over[0]):
            texts.append(line.text)

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    logs.add(RUN, RunLogLine(2.0, "w", "PRINT", "second"))
    over[0] = True
    logs.close_run(RUN)
    async with asyncio.timeout(PATIENCE_S):
        await following
    assert texts == ["first", "second"]


# ---- chores ----


async def test_a_chore_is_shared_by_all_who_ask_while_it_is_due() -> None:
    num_done = 0
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def chore() -> None:
        nonlocal num_done
        num_done += 1
        has_begun.set()
        await may_end.wait()

    paced = Paced(chore, pause_s=0.0)
    asking = [asyncio.create_task(paced.ask()) for _ in range(3)]
    await has_begun.wait()
    asking += [asyncio.create_task(paced.ask()) for _ in range(3)]  # after it has begun
    await asyncio.sleep(0)
    may_end.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*asking)
    assert num_done == 2
