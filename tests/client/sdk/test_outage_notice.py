"""Who waits for a coordinator is told why, once for each outage."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from stratagem.client import AsyncClient, Client, Phase
from stratagem.client.sdk import connection as outage_notice
from stratagem.client.sdk import connection as retrying_calls
from stratagem.client.sdk.connection import Connection, OutageNotice, SharedOutage
from stratagem.client.sdk.run import AsyncRun
from stratagem.common.base.errors import (
    InProgressError,
    NotFoundError,
    StandbyError,
    UnavailableError,
)
from stratagem.common.base.retry import Backoff
from stratagem.common.rpc.status_codes import to_status
from stratagem.v1 import coordinator_pb2 as pb
from tests.client.fake_coordinator import JOB, FakeCoordinator, serve
from tests.free_ports import free_port
from tests.patience import PATIENCE_S


class Told:
    """What was told, and what waits for the next one."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._news = asyncio.Event()

    def warn(self, form: str, *values: object) -> None:
        self.texts.append(form % values)
        self._news.set()

    async def next(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            await self._news.wait()
        self._news.clear()
        return self.texts[-1]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Each failure counts as one that has lasted."""
    made = Told()
    monkeypatch.setattr(outage_notice, "REPORTED_AFTER_S", 0.0)
    monkeypatch.setattr(outage_notice.log, "warning", made.warn)
    return made


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set at each answer that is noted."""
    noted, answered = asyncio.Event(), OutageNotice.note_answer

    def note(notice: OutageNotice) -> None:
        answered(notice)
        noted.set()

    monkeypatch.setattr(OutageNotice, "note_answer", note)
    return noted


def error_of(error: Exception) -> grpc.aio.AioRpcError:
    """The error as it arrives at a client."""
    status = to_status(error)
    assert status is not None
    metadata = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, status.details)


NOBODY = grpc.aio.AioRpcError(
    grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "Connection refused"
)
FULL = error_of(UnavailableError("the disk is full"))
WORKING = error_of(InProgressError("a state is being copied"))
BUSY = error_of(UnavailableError("the journal is away"))
STANDBY = error_of(StandbyError("stands by", ""))


async def watched(run: AsyncRun) -> None:
    async for _ in run.watch():
        pass


@pytest.mark.parametrize("lasting_s", [0.0, PATIENCE_S])
def test_who_waits_for_long_is_told_once_why_and_how_long(
    client: Client,
    fake: FakeCoordinator,
    lasting_s: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(outage_notice, "REPORTED_AFTER_S", lasting_s)
    run = client.submit(JOB)
    for _ in range(2):
        fake.refusals = 3
        assert run.status().phase is Phase.COMPLETED
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    why = f"the coordinator at {client.address} cannot do it now: shutting down"
    once = f"{why}; trying again for up to {PATIENCE_S:g} s"
    assert told == ([once, once] if lasting_s == 0 else [])


async def test_who_follows_a_run_is_told_once_that_nobody_answers(told: Told) -> None:
    fake = FakeCoordinator()
    fake.ending = "never"
    server, address = await serve(fake, free_port())
    async with AsyncClient(address) as client:
        run = await client.submit(JOB, "mine")
        async with asyncio.TaskGroup() as group:
            following = [group.create_task(watched(run)) for _ in range(2)]
            await server.stop(None)
            await told.next()
            server, _ = await serve(fake, int(address.rpartition(":")[2]))
            fake.runs["mine"].say("RunCompleted", "done", pb.RUN_PHASE_COMPLETED)
            await asyncio.wait(following)
    await server.stop(None)
    (text,) = told.texts
    assert text.startswith(f"no coordinator answers at {address}: ")
    assert text.endswith("; trying again until one does")


async def test_two_outages_of_a_stream_without_news_are_told_twice_and_asked_about_at_once(
    told: Told, answers: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream has begun between them: its pauses begin with the shortest one again."""
    limits: list[float] = []

    class Pauses(Backoff):
        def next_s(self) -> float:
            limits.append(self._limit_s)
            return super().next_s()

    monkeypatch.setattr(retrying_calls, "Backoff", Pauses)
    fake = FakeCoordinator()
    fake.ending = "never"
    server, address = await serve(fake, free_port())
    port = int(address.rpartition(":")[2])
    async with AsyncClient(address) as client:
        run = await client.submit(JOB, "mine")
        following = asyncio.create_task(run.watch(from_index=3).__anext__())
        for _ in range(2):
            before = len(limits)
            answers.clear()
            await server.stop(None)
            assert (await told.next()).startswith(f"no coordinator answers at {address}: ")
            server, _ = await serve(fake, port)
            async with asyncio.timeout(PATIENCE_S):
                await answers.wait()
            assert limits[before] == retrying_calls.MIN_PAUSE_S
        fake.runs["mine"].say("RunCompleted", "done", pb.RUN_PHASE_COMPLETED)
        await following
    await server.stop(None)
    assert len(told.texts) == 2


async def test_an_answer_that_is_an_error_ends_an_outage(told: Told) -> None:
    fake = FakeCoordinator()
    server, address = await serve(fake, free_port())
    port = int(address.rpartition(":")[2])
    async with AsyncClient(address) as client:
        run = await client.submit(JOB, "mine")
        fake.runs.clear()
        for _ in range(2):
            await server.stop(None)
            waiting = asyncio.create_task(run.status())
            assert (await told.next()).startswith(f"no coordinator answers at {address}: ")
            server, _ = await serve(fake, port)
            with pytest.raises(NotFoundError):
                await waiting
    await server.stop(None)
    assert len(told.texts) == 2


def test_calls_that_are_refused_tell_it_once_whatever_others_are_answered(told: Told) -> None:
    outage = SharedOutage()
    for num_told in (1, 2):
        refused = [OutageNotice("here", outage) for _ in range(10)]
        for call in refused * 2:
            with OutageNotice("here", outage) as poll:
                poll.note_answer()
            call.note_retry(FULL, "a while")
        assert len(told.texts) == num_told
        for call in refused[:5]:
            call.note_answer()
        refused[5].note_retry(FULL, "a while")
        assert len(told.texts) == num_told
        for call in refused[5:]:
            call.__exit__(None, None, None)


async def test_what_a_coordinator_works_at_takes_none_of_the_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is a client then one to whom nobody has ever answered."""
    now_s = [0.0]
    monkeypatch.setattr(retrying_calls, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    errors = [WORKING, NOBODY, WORKING, NOBODY]

    async def method(_request: str, timeout: float) -> str:
        if not errors:
            return "done"
        now_s[0] += 100.0 if errors[0] is WORKING else 1.0
        raise errors.pop(0)

    connection = Connection("127.0.0.1:1", patience_s=10.0)
    answer = await connection.call(cast("Any", method), "submit it")
    await connection.close()
    assert answer == "done"


def test_an_outage_is_told_once_more_after_an_answer_and_not_for_an_error_from_before_it(
    told: Told,
) -> None:
    outage = SharedOutage()
    late, other = (OutageNotice("here", outage) for _ in range(2))
    for call in (late, other):
        call.note_error()
    other.note_retry(NOBODY, "a while")
    other.note_answer()
    late.note_retry(NOBODY, "a while")  # it was found out only now that nobody answered it
    assert len(told.texts) == 1
    late.note_error()
    for call in (late, other):
        call.note_retry(NOBODY, "a while")
    assert len(told.texts) == 2, "nobody answers again, though who has told of it waits still"


def test_calls_that_are_refused_for_two_reasons_at_a_time_tell_both_once(told: Told) -> None:
    outage = SharedOutage()
    first, second = OutageNotice("here", outage), OutageNotice("here", outage)
    for _ in range(2):
        first.note_retry(FULL, "a while")
        second.note_retry(BUSY, "a while")
    reasons = ["the disk is full", "the journal is away"]
    texts = [
        f"the coordinator at here cannot do it now: {why}; trying again a while" for why in reasons
    ]
    assert told.texts == texts
    second.note_retry(FULL, "a while")
    assert told.texts == texts, "one that another call has told"
    first.note_answer()
    second.note_answer()
    first.note_retry(FULL, "a while")
    assert told.texts == [*texts, texts[0]], "another refusal"


@pytest.mark.parametrize(("between", "num_told"), [(FULL, 2), (STANDBY, 1)])
def test_a_refusal_is_an_answer_unless_it_is_that_of_a_standby(
    told: Told, between: grpc.aio.AioRpcError, num_told: int
) -> None:
    outage = SharedOutage()
    for error in (NOBODY, between, NOBODY):
        OutageNotice("here", outage).note_retry(error, "a while")
    assert len([text for text in told.texts if text.startswith("no coordinator")]) == num_told
