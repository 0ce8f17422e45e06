"""What the page knows of a run whose past takes long to read."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from stratagem.client.course import views
from stratagem.client.course.step_history import History
from stratagem.client.course.views import Event, Phase, RunStatus
from stratagem.client.dashboard.books import RunBook
from stratagem.client.report.run import ReportedRun
from stratagem.client.sdk.run import AsyncRun
from stratagem.common.base.errors import UnavailableError
from stratagem.v1 import coordinator_pb2 as pb
from tests.patience import PATIENCE_S

NUM_EVENTS = 10


@dataclass
class SlowRun:
    """A run whose events can be read up to one, and whose coordinator may go away."""

    run_id: str = "slow"
    until: int = 0
    submitted_at_s: float = 1.0
    is_away: bool = False
    asked: list[int] = field(default_factory=list)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def status(self) -> RunStatus:
        info = pb.RunInfo(
            run_id=self.run_id,
            phase=pb.RunPhase.RUN_PHASE_COMPLETED,
            submitted_at_s=self.submitted_at_s,
            event_index=NUM_EVENTS - 1,
            job_json="{}",
        )
        return views.run_status(info)

    async def history(self, *_: object, **__: object) -> History:
        return History([])

    async def past(self, first: int) -> AsyncIterator[list[Event]]:
        self.asked.append(first)
        for index in range(first, NUM_EVENTS):
            while index >= self.until:
                await self.moved.wait()
                if self.is_away:
                    raise UnavailableError("gone")
            yield [Event(index, float(index), "Noted", "", {"kind": "x"}, Phase.RUNNING)]

    def go_on(self, until: int) -> None:
        self.until = until
        self.moved.set()
        self.moved.clear()


def told(run: ReportedRun, width: int) -> str:
    return json.dumps([run.course.num_events, width])


def book_of(run: SlowRun, patience_s: float) -> RunBook:
    return RunBook(cast(AsyncRun, run), patience_s)


async def read(book: RunBook, num: int) -> None:
    """Wait until so many events are taken."""
    async with asyncio.timeout(PATIENCE_S):
        while (await book.shown(0.0)).course.num_events < num:
            pass


async def test_a_long_past_is_drawn_as_far_as_it_was_read() -> None:
    run = SlowRun()
    book = book_of(run, patience_s=0.0)
    assert json.loads(await book.drawing(400, told)) == [0, 400]
    run.go_on(4)
    await read(book, 4)
    whole = asyncio.create_task(book.shown())
    run.go_on(NUM_EVENTS)
    assert (await whole).course.num_events == NUM_EVENTS, "this one waits for all of them"
    assert json.loads(await book.drawing(400, told)) == [NUM_EVENTS, 400]
    assert run.asked == [0], "nothing is read twice"


async def test_tabs_that_ask_while_it_is_read_share_a_picture() -> None:
    run, drawings = SlowRun(), []

    def counted(shown: ReportedRun, width: int) -> str:
        drawings.append(width)
        return told(shown, width)

    book = book_of(run, patience_s=0.0)
    texts = {await book.drawing(400, counted)}
    run.go_on(4)
    book._patience_s = PATIENCE_S  # the moment in which they share it
    asked: list[Any] = [asyncio.create_task(book.drawing(400, counted)) for _ in range(5)]
    run.go_on(NUM_EVENTS)
    texts |= set(await asyncio.gather(*asked))
    assert [json.loads(text)[0] for text in sorted(texts)] == [0, NUM_EVENTS]
    assert len(drawings) == 2


async def test_who_asks_during_a_drawing_is_given_it_while_there_is_more_to_read() -> None:
    run, drawings, loop = SlowRun(until=4), [], asyncio.get_running_loop()

    def counted(shown: ReportedRun, width: int) -> str:
        drawings.append(shown.course.num_events)
        loop.call_soon_threadsafe(run.go_on, NUM_EVENTS - 1)
        return told(shown, width)

    book = book_of(run, patience_s=0.0)
    await read(book, 4)
    first, second = await asyncio.gather(book.drawing(400, counted), book.drawing(400, counted))
    assert first == second == json.dumps([4, 400])
    assert drawings == [4]
    book.close()


async def test_a_coordinator_that_goes_away_while_it_reads_is_asked_for_the_rest() -> None:
    run = SlowRun(until=6)
    book = book_of(run, patience_s=0.0)
    await read(book, 6)
    run.is_away = True
    run.go_on(6)
    with pytest.raises(UnavailableError):
        await book.shown()
    run.is_away = False
    run.go_on(NUM_EVENTS)
    assert (await book.shown()).course.num_events == NUM_EVENTS
    assert run.asked == [0, 6]


async def test_another_run_of_the_name_is_read_anew() -> None:
    run = SlowRun(until=6)
    book = book_of(run, patience_s=0.0)
    await read(book, 6)
    run.submitted_at_s = 2.0
    run.go_on(NUM_EVENTS)
    assert (await book.shown()).course.num_events == NUM_EVENTS
    assert run.asked == [0, 0]
