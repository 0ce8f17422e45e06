"""The agent of a worker, against coordinators that are new, old, restarted or silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from stratagem.common.rpc.channel import Coordinators
from stratagem.common.rpc.server import bind, make_server
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1 import types_pb2
from stratagem.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from stratagem.worker.host.clock import CoordinatorClock
from stratagem.worker.process import heartbeat
from stratagem.worker.process import heartbeat as heartbeat_stream
from stratagem.worker.process.heartbeat import Agent, Identity
from tests.patience import PATIENCE_S

INTERVAL_S = 0.02


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream ends, and no leaving, as this process stands still."""
    for module in (heartbeat, heartbeat_stream):
        monkeypatch.setattr(module, "LEAST_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(heartbeat, "LEAVE_TIMEOUT_S", PATIENCE_S)


class Fake(CoordinatorServiceServicer):
    """A coordinator that counts what comes, and answers as it is told to."""

    is_old = False
    """Of the version before, which knows no stream."""
    is_talkative = False
    """Says something unasked before each answer."""
    answers = True
    released = run_unknown = False

    def __init__(self, **told: bool) -> None:
        self.__dict__ |= told
        self.num_registered = 0
        self.singles: list[pb.HeartbeatRequest] = []
        self.streams: list[list[pb.HeartbeatStreamRequest]] = []
        self.left: list[pb.LeaveRequest] = []
        self.ends_after: list[tuple[int, grpc.StatusCode | None]] = []
        """Of each stream to come: how many beats it takes, and its status; None: OK."""
        self.changed = asyncio.Condition()

    async def wait(self, condition: Any) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(condition)

    async def note(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def RegisterWorker(self, request: Any, context: Any) -> pb.RegisterWorkerResponse:
        self.num_registered += 1
        await self.note()
        return pb.RegisterWorkerResponse(
            term=1, heartbeat_interval_s=INTERVAL_S, store_id=f"store {self.num_registered}"
        )

    async def Leave(self, request: Any, context: Any) -> pb.LeaveResponse:
        self.left.append(request)
        await self.note()
        return pb.LeaveResponse()

    async def Heartbeat(self, request: Any, context: Any) -> pb.HeartbeatResponse:
        self.singles.append(request)
        await self.note()
        return pb.HeartbeatResponse(term=1, time_s=5.0, released=self.released)

    async def HeartbeatStream(
        self, requests: Any, context: Any
    ) -> AsyncIterator[pb.HeartbeatStreamResponse]:
        if self.is_old:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        beats: list[pb.HeartbeatStreamRequest] = []
        self.streams.append(beats)
        limit, status = self.ends_after.pop(0) if self.ends_after else (None, None)
        async for request in requests:
            if self.is_talkative:
                yield pb.HeartbeatStreamResponse(term=2, num_beats=len(beats), time_s=1.0)
            beats.append(request)
            await self.note()
            if len(beats) == limit:
                if status is not None:
                    await context.abort(status, "as told")
                return
            if self.answers:
                yield pb.HeartbeatStreamResponse(
                    term=2,
                    num_beats=len(beats),
                    interval_s=INTERVAL_S,
                    time_s=9.0,
                    released=self.released,
                    run_unknown=self.run_unknown,
                )


@asynccontextmanager
async def served(fake: Fake) -> AsyncIterator[str]:
    server = make_server()
    add_CoordinatorServiceServicer_to_server(fake, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def beating(*addresses: str) -> AsyncIterator[Agent]:
    identity = Identity("w", "one", "127.0.0.1:1", types_pb2.Capability(device="cpu"))
    agent = Agent(Coordinators(addresses), identity, lambda _term: None, CoordinatorClock())
    agent.for_run = "r-1"
    running = asyncio.create_task(agent.run())
    try:
        yield agent
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize(
    ("status", "num_registered"),
    [(None, 1), (grpc.StatusCode.UNAVAILABLE, 1), (grpc.StatusCode.NOT_FOUND, 3)],
)
async def test_a_stream_that_ends_is_opened_again_by_who_registers_where_it_is_not_known(
    status: grpc.StatusCode | None, num_registered: int
) -> None:
    """Each registration tells the folder of states; of each stream the first message alone names
    the worker."""
    fake, told = Fake(), list[str]()
    fake.ends_after = [(2, status), (1, status)]
    async with served(fake) as address, beating(address) as agent:
        agent.on_store = told.append
        await fake.wait(lambda: len(fake.streams) == 3 and len(fake.streams[2]) >= 3)
    assert told == [f"store {number + 1}" for number in range(num_registered)]
    first = pb.HeartbeatStreamRequest(worker_id="w", incarnation="one", for_run="r-1")
    for beats in fake.streams:
        assert beats[0] == first
        assert set(map(str, beats[1:])) <= {""}


async def test_a_drain_and_the_leaving_are_said_at_once() -> None:
    fake = Fake()
    async with served(fake) as address, beating(address) as agent:
        await fake.wait(lambda: fake.streams and len(fake.streams[0]) >= 2)
        agent.drain()
        async with asyncio.timeout(PATIENCE_S):
            await agent.until_drain_is_announced()
        assert fake.streams[0][-1].draining
        await agent.leave("done")
        assert [each.reason for each in fake.left] == ["done"]


async def test_a_coordinator_of_the_version_before_gets_single_beats() -> None:
    fake = Fake(is_old=True)
    async with served(fake) as address, beating(address) as agent:
        released = asyncio.Event()
        agent.on_released = released.set
        await fake.wait(lambda: len(fake.singles) >= 3)
        fake.released = True
        async with asyncio.timeout(PATIENCE_S):
            await released.wait()
        agent.drain()
        async with asyncio.timeout(PATIENCE_S):
            await agent.until_drain_is_announced()
        assert fake.singles[-1].draining
        assert {each.for_run for each in fake.singles} == {"r-1"}
        assert agent.clock.offset.error_s < PATIENCE_S
    assert fake.num_registered == 1


async def test_a_silent_coordinator_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat_stream, "LEAST_TIMEOUT_S", 0.2)
    silent, other = Fake(answers=False), Fake()
    async with served(silent) as first, served(other) as second, beating(first, second):
        await other.wait(lambda: any(len(beats) >= 2 for beats in other.streams))
    assert silent.num_registered == 1
    assert other.num_registered == 0


async def test_a_failure_that_lasts_is_told_again_after_pauses_that_double(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    identity = Identity("w", "one", "10.0.0.9:1", types_pb2.Capability(device="cpu"))
    agent = Agent(Coordinators(("127.0.0.1:1",)), identity, lambda _term: None, CoordinatorClock())
    said, now_s = list[tuple[str, float]](), 0.0
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(heartbeat, "name_of", lambda _error: "FailedPreconditionError")
    for level in ("warning", "debug"):

        def note(_what: str, level: str = level, **_about: object) -> None:
            said.append((level, now_s))

        monkeypatch.setattr(heartbeat.log, level, note)
    details = "nobody answers at 10.0.0.9:1 as worker w"
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.FAILED_PRECONDITION, grpc.aio.Metadata(), grpc.aio.Metadata(), details
    )
    for attempt in range(2000):
        now_s = 5.0 * attempt
        await agent._report(attempt, "cannot register", error, "127.0.0.1:1")
    told = [at_s for level, at_s in said if level == "warning"]
    assert told == [0, 60, 180, 420, 900, 1860, 3780, 7380]


class Readings(CoordinatorClock):
    """Remembers the coordinator's times that were taken for readings."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s: list[float] = []

    def note(self, sent_s: float, received_s: float, coordinator_s: float) -> None:
        self.times_s.append(coordinator_s)


async def test_what_is_said_unasked_is_no_answer() -> None:
    """It neither ends the wait for one nor counts as a reading of the clock."""
    fake, readings = Fake(is_talkative=True), Readings()
    async with served(fake) as address, beating(address) as agent:
        agent.clock = readings
        await fake.wait(lambda: fake.streams and len(fake.streams[0]) >= 5)
    assert set(readings.times_s) == {9.0}


async def test_a_registration_is_given_more_time_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where thousands begin together, those that give up have to begin anew."""
    monkeypatch.setattr(heartbeat, "CALL_TIMEOUT_S", 0.2)

    class Busy(Fake):
        """Answers who waits for more than twice as long as at first."""

        async def RegisterWorker(self, request: Any, context: Any) -> pb.RegisterWorkerResponse:
            if context.time_remaining() < 0.5:
                await asyncio.Event().wait()
            return await super().RegisterWorker(request, context)

    fake = Busy()
    async with served(fake) as address, beating(address):
        await fake.wait(lambda: fake.num_registered)


@pytest.mark.parametrize("was_there", [False, True], ids=["never there", "deleted"])
async def test_a_run_that_was_never_there_is_told_from_one_that_is_gone(was_there: bool) -> None:
    fake, told = Fake(), asyncio.Queue[str]()
    fake.released = fake.run_unknown = not was_there
    async with served(fake) as address, beating(address) as agent:
        agent.on_released = lambda: told.put_nowait("ended")
        agent.on_unknown = lambda: told.put_nowait("unknown")
        await fake.wait(lambda: fake.streams and len(fake.streams[0]) >= 3)
        fake.released = fake.run_unknown = True
        async with asyncio.timeout(PATIENCE_S):
            assert await told.get() == ("ended" if was_there else "unknown")
