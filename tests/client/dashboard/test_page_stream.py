"""What tabs are told of a run: one subscription for all of them, at the pace of each."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from starlette.types import Message

from stratagem.client.course import views
from stratagem.client.course.views import Event, Phase, Progress, RunsChange, RunStatus
from stratagem.client.dashboard import stream, watches
from stratagem.client.dashboard.stream import TabResponse, TabStream
from stratagem.client.dashboard.watches import CoordinatorWatch, RunsWatch, RunWatch, SentRuns
from stratagem.client.sdk.client import AsyncClient
from stratagem.client.sdk.run import AsyncRun
from stratagem.v1 import coordinator_pb2 as pb
from tests.patience import PATIENCE_S


@dataclass
class CountedRun:
    """A run that is over after some events, and what it was asked."""

    run_id: str = "run"
    num_events: int = 3
    is_over: bool = False
    asked: list[str] = field(default_factory=list)
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)
    progress: list[Progress] = field(default_factory=list)

    async def status(self) -> RunStatus:
        self.asked.append("status")
        index = self.num_events - 1
        phase = pb.RunPhase.RUN_PHASE_RUNNING
        return views.run_status(pb.RunInfo(run_id=self.run_id, phase=phase, event_index=index))

    async def past(self, first: int, *, before_index: int) -> AsyncIterator[list[Event]]:
        self.asked.append("past")
        for start in range(first, before_index, 10):
            yield [event(index) for index in range(start, min(start + 10, before_index))]

    async def watch(self, first: int) -> AsyncIterator[Event | Progress]:
        self.asked.append("watch")
        while not self.is_over or first < self.num_events:
            while first < self.num_events:
                yield event(first)
                first += 1
            while self.progress:
                yield self.progress.pop(0)
            async with self.moved:
                while not (self.is_over or first < self.num_events or self.progress):
                    await self.moved.wait()

    async def go_on(self, num_events: int, *progress: Progress, is_over: bool = False) -> None:
        self.num_events, self.is_over = num_events, is_over
        self.progress += progress
        async with self.moved:
            self.moved.notify_all()


def event(index: int) -> Event:
    return Event(index, float(index), "WorkLost", "", {}, Phase.RUNNING)


def step(number: int) -> Progress:
    return Progress(number, 100, 0.5, 1.0, 0, 0, 0, 1, "")


async def until(is_so: Callable[[], bool]) -> None:
    """Let others go on until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110  (what changes it has no event)
            await asyncio.sleep(0)


class Live:
    """A coordinator that answers."""

    address = "here:1"

    async def workers(self) -> list[object]:
        return []


class Tab:
    """A browser's tab: reads when it is told to."""

    def __init__(self, watch: RunWatch, index: int) -> None:
        self.messages = TabStream(CoordinatorWatch(cast(AsyncClient, Live()))).of_run(watch, index)

    async def next(self, kind: str) -> Any:
        """The next message of a kind: the number of a fact, the value of another one."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = (await anext(self.messages)).decode().strip()
                lines = dict(line.split(": ", 1) for line in message.splitlines())
                if lines["event"] == kind:
                    return int(lines["id"]) if "id" in lines else json.loads(lines["data"])

    async def until(self, kind: str) -> list[str]:
        """The kinds of the messages before one of a kind, beats aside."""
        kinds: list[str] = []
        async with asyncio.timeout(PATIENCE_S):
            while kinds[-1:] != [kind]:
                message = (await anext(self.messages)).decode()
                kinds.append(message.partition("event: ")[2].split()[0])
        return [each for each in kinds[:-1] if each != "beat"]

    async def facts(self, count: int) -> list[int]:
        return [await self.next("fact") for _ in range(count)]


def watch_of(run: CountedRun) -> RunWatch:
    return RunWatch(cast(AsyncRun, run))


async def test_ten_tabs_are_one_subscription_and_ask_once_how_a_run_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watches, "STATUS_S", PATIENCE_S)
    run = CountedRun()
    watch = watch_of(run)
    tabs = [Tab(watch, 3) for _ in range(10)]
    waiting = [asyncio.create_task(tab.facts(2)) for tab in tabs]
    await until(lambda: watch.is_ready)
    await run.go_on(5)
    assert await asyncio.gather(*waiting) == [[3, 4]] * 10
    assert run.asked == ["status", "watch"]
    found = await asyncio.gather(*(watch.status() for _ in tabs))
    assert {each.event_index for each in found} == {4}
    assert run.asked == ["status", "watch", "status"]
    await run.go_on(6)
    assert await tabs[0].facts(1) == [5]
    assert (await watch.status()).event_index == 5, "what has changed is asked for again"
    for tab in tabs:
        await tab.messages.aclose()
    assert not watch.subscription.is_on


async def test_a_tab_that_reads_slowly_is_told_all_once_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watches, "KEPT", 4)
    run = CountedRun()
    watch = watch_of(run)
    slow, fast = Tab(watch, 0), Tab(watch, 3)
    assert await slow.facts(3) == [0, 1, 2], "of the past"
    waiting = asyncio.create_task(fast.facts(97))
    for num_events in range(4, 101):
        await run.go_on(num_events)
        await until(lambda: watch.next >= run.num_events)
    assert await waiting == list(range(3, 100))
    assert (watch.first, watch.next) == (96, 100)
    assert await slow.facts(97) == list(range(3, 100))
    assert run.asked.count("watch") == 1
    await run.go_on(101, is_over=True)
    assert [await tab.next("end") for tab in (slow, fast)] == [{}, {}]
    back = Tab(watch, 99)
    assert await back.facts(2) == [99, 100]
    assert await back.next("end") == {}


async def test_of_progress_a_tab_is_told_the_latest_and_after_its_end_a_run_has_none() -> None:
    run = CountedRun()
    watch = watch_of(run)
    tab = Tab(watch, 3)
    waiting = asyncio.create_task(tab.next("progress"))
    await run.go_on(3, *map(step, range(1, 50)))
    assert (await waiting)["step"] == 49
    await run.go_on(3, step(50), is_over=True)
    await tab.next("end")
    assert (watch.progress, watch._timer) == (b"", None)
    assert await Tab(watch, 3).until("end") == []


async def test_progress_of_a_run_that_nobody_looked_at_any_more_is_told_to_nobody() -> None:
    run = CountedRun()
    watch = watch_of(run)
    tab = Tab(watch, 3)
    waiting = asyncio.create_task(tab.next("progress"))
    await run.go_on(3, step(48))
    assert (await waiting)["step"] == 48
    assert (await watch.status()).event_index == 2
    await run.go_on(3, step(49))  # which waits, as nobody can read so many of them
    await until(lambda: watch._timer is not None)
    await tab.messages.aclose()

    await run.go_on(4, is_over=True)
    back = Tab(watch, 3)
    assert await back.until("end") == ["fact"]
    assert (await watch.status()).event_index == 3, "the answer of then is none of now"
    await back.messages.aclose()


async def test_a_defect_in_following_is_logged_and_told_to_tabs_and_it_begins_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watches, "RETRY_S", 0.0)
    run = CountedRun(num_events=4)
    take, defects = RunWatch._take, [ZeroDivisionError("a defect"), KeyError("another")]

    def taken(watch: RunWatch, item: Event | Progress) -> None:
        if defects:
            raise defects.pop()
        take(watch, item)

    monkeypatch.setattr(RunWatch, "_take", taken)
    watch = watch_of(run)
    tab = Tab(watch, 4)
    beats = [await tab.next("beat") for _ in range(2)]
    assert [each["state"] for each in beats] == ["connecting", "live"]
    await run.go_on(6)
    told = [await tab.next("beat") for _ in range(2)]
    assert [each["state"] for each in told] == ["broken", "broken"]
    assert "KeyError('another')" in told[0]["why"]
    assert "ZeroDivisionError('a defect')" in told[1]["why"]
    assert await tab.facts(2) == [4, 5], "it begins again"
    logged = [each for each in caplog.records if "run run no further" in each.getMessage()]
    assert [each.exc_info is not None for each in logged] == [True, True]
    monkeypatch.setattr(watches, "TROUBLE_S", 0.0)
    monkeypatch.setattr(stream, "BEAT_S", 0.0)
    assert (await tab.next("beat"))["state"] == "live"
    await tab.messages.aclose()


async def test_another_run_of_the_name_is_told_from_where_it_is() -> None:
    run = CountedRun(num_events=2)
    watch = watch_of(run)
    tab = Tab(watch, 50)
    waiting = asyncio.create_task(tab.facts(1))
    await until(lambda: watch.is_ready)
    await run.go_on(3)
    assert await waiting == [2]


async def test_a_tab_that_reads_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "STALL_S", 0.01)
    run = CountedRun()
    watch = watch_of(run)
    messages = Tab(watch, 0).messages
    sent: list[Message] = []
    reads = asyncio.Event()

    async def send(message: Message) -> None:
        if len(sent) == 3:  # the begin, and two messages
            await reads.wait()
        sent.append(message)

    answering = asyncio.create_task(TabResponse(messages).stream_response(send))
    await until(lambda: len(sent) == 3 and not watch.subscription.is_on)
    reads.set()
    await answering
    assert [message.get("more_body") for message in sent] == [None, True, True, False]


def brief(run_id: str, index: int) -> Any:
    phase = pb.RunPhase.RUN_PHASE_RUNNING
    return views.run_brief(pb.RunBrief(run_id=run_id, event_index=index, phase=phase))


def change(*runs: tuple[str, int], deleted: tuple[str, ...] = (), **flags: bool) -> RunsChange:
    flags = {"is_complete": True, **flags}
    return RunsChange(tuple(brief(*run) for run in runs), deleted, time_s=1.0, **flags)


def told(watch: RunsWatch, seen: SentRuns) -> list[dict[str, Any]]:
    return [json.loads(each.decode().partition("data: ")[2]) for each in watch.news(seen)]


def test_each_tab_is_told_of_runs_what_it_has_not_been_told() -> None:
    watch, early = RunsWatch(cast(AsyncClient, None)), SentRuns()
    assert told(watch, early) == []
    watch._take(change(("a", 1), ("b", 1), is_complete=False, is_first=True))
    assert [run["run_id"] for run in told(watch, early)[0]["runs"]] == ["a", "b"]
    watch._take(change())
    assert [(each["is_first"], each["is_complete"]) for each in told(watch, early)] == [
        (False, True)
    ]
    watch._take(change(("a", 2)))
    watch._take(change(("a", 3), deleted=("b",)))
    [news] = told(watch, early)
    assert [(run["run_id"], run["event_index"]) for run in news["runs"]] == [("a", 3)]
    assert news["deleted"] == ["b"]
    assert told(watch, early) == []
    late = SentRuns()
    [news] = told(watch, late)
    assert (news["is_first"], news["is_complete"], len(news["runs"])) == (True, True, 1)
    watch._take(change(("c", 1), is_first=True))  # after a cut
    for seen in (early, late):
        [news] = told(watch, seen)
        assert (news["is_first"], [run["run_id"] for run in news["runs"]]) == (True, ["c"])


def test_many_runs_are_several_messages() -> None:
    watch, seen = RunsWatch(cast(AsyncClient, None)), SentRuns()
    watch._take(change(*((f"r-{n}", 1) for n in range(450)), is_first=True))
    news = told(watch, seen)
    assert [len(each["runs"]) for each in news] == [200, 200, 50]
    assert [each["is_first"] for each in news] == [True, False, False]
    assert [each["is_complete"] for each in news] == [False, False, True]


async def test_what_was_told_to_tabs_is_not_asked_for_again() -> None:
    run = CountedRun()
    watch = watch_of(run)
    assert watch.events_from(0) == []
    tab = Tab(watch, 3)
    waiting = asyncio.create_task(tab.facts(2))
    await until(lambda: watch.is_ready)
    await run.go_on(6)
    await waiting
    await until(lambda: watch.next == 6)
    assert [each.index for each in watch.events_from(4)] == [4, 5]
    assert watch.events_from(2) == watch.events_from(6) == []
