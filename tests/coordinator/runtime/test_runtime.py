"""What watchers are given, the log lines of runs, and chores that are shared."""

import asyncio
from dataclasses import replace
from pathlib import Path

from stratagem.common.base.ids import Party, RunId
from stratagem.coordinator.core.commands import EventSpan
from stratagem.coordinator.core.facts import RunFailed, RunReleased
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.observe.feed import (
    MAX_EVENTS,
    PAGE_BYTES,
    Feed,
    FeedEvent,
    SegmentProgress,
)
from stratagem.coordinator.observe.logs import RunLogLine, RunLogs
from stratagem.coordinator.runtime.supervisor import Paced
from tests.patience import PATIENCE_S

RUN = RunId("run-1")
ROOT = Party("")


# ---- feed and logs ----


async def test_watcher_gets_events_from_its_index_then_progress_then_the_end() -> None:
    fact = RunReleased()
    last = FeedEvent(3, 3.0, fact, RunPhase.COMPLETED)

    async def history(run_id: RunId, span: EventSpan, _num_events: int) -> list[FeedEvent]:
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
    assert [item.index for item in seen if isinstance(item, FeedEvent)] == [1, 2, 3]
    assert progress in seen
    assert feed.last_wall_s(RUN) == 3.0


async def test_a_watcher_reads_what_memory_no_longer_holds_from_the_journal() -> None:
    """More events than are kept, an ended run, and one that is deleted under its watcher."""
    total = 2 * MAX_EVENTS + 1  # as many more as it takes to have them cut
    events = [FeedEvent(n, 0.0, RunReleased(), RunPhase.RUNNING) for n in range(total)]
    asked: list[int] = []

    async def history(run_id: RunId, span: EventSpan, _num_events: int) -> list[FeedEvent]:
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

    async def history(run_id: RunId, span: EventSpan, _num_events: int) -> list[FeedEvent]:
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
    backwards = [page async for page in feed.past(RUN, replace(failed, newest_first=True))]
    assert backwards == [wanted[:-3:-1], wanted[-3::-1]]
    assert [page async for page in feed.past(RUN, replace(failed, from_index=704))] == [wanted[2:]]


async def test_as_many_events_are_read_at_once_as_their_payloads_leave_room_for() -> None:
    small, medium, large = (size * "x" for size in (10, 1000, 2 * PAGE_BYTES))
    events = [
        FeedEvent(n, 0.0, RunReleased(), RunPhase.RUNNING, payload=payload)
        for n, payload in enumerate([medium] * 100 + [small] * 300 + [large] * 300)
    ]

    async def history(run_id: RunId, span: EventSpan, num_events: int) -> list[FeedEvent]:
        return events[span.from_index :][:num_events]

    pages = [len(page) async for page in Feed(history).past(RUN, EventSpan(), 256)]
    assert pages == [100, 256, 256, *[1] * 88]
    pages = [len(page) async for page in Feed(history).past(RUN, EventSpan(650), 30)]
    assert pages == [30, *[1] * 20]


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
