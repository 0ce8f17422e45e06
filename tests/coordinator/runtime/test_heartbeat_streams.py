"""The standing calls of workers, with messages in queues instead of a network."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from stratagem.common.base.errors import (
    InvalidInputError,
    UnauthenticatedError,
    UnavailableError,
)
from stratagem.common.base.ids import Incarnation, RunId, WorkerId
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.runtime.leases import (
    LEAST_GAP_S,
    HeartbeatStreams,
    Leases,
    PaceRule,
    Wire,
)
from stratagem.v1 import coordinator_pb2 as pb
from tests.patience import PATIENCE_S

RULE = PaceRule(2.0, 10.0)
BEAT = pb.HeartbeatStreamRequest()


def member(name: str) -> Member:
    return Member(worker_id=WorkerId(name), incarnation=Incarnation(name))


@dataclass
class Worker:
    """One end of a call: what the worker says, what it is answered, and how the call ended."""

    says: asyncio.Queue[pb.HeartbeatStreamRequest | None] = field(default_factory=asyncio.Queue)
    hears: asyncio.Queue[pb.HeartbeatStreamResponse] = field(default_factory=asyncio.Queue)
    call: "asyncio.Task[None] | None" = None

    async def beat(self, beat: pb.HeartbeatStreamRequest = BEAT) -> pb.HeartbeatStreamResponse:
        await self.says.put(beat)
        return await self.answer()

    async def answer(self) -> pb.HeartbeatStreamResponse:
        async with asyncio.timeout(PATIENCE_S):
            return await self.hears.get()

    async def end(self) -> None:
        """Wait for the end of the call; raises what it raises."""
        assert self.call is not None
        async with asyncio.timeout(PATIENCE_S):
            await self.call


class Rig:
    def __init__(self, lasts_s: float = 3600.0) -> None:
        self.now_s = 0.0
        self.over: set[RunId] = set()
        self.deleted: set[RunId] = set()
        self.drained: list[Member] = []
        self.revoked = False
        self.leases = Leases(RULE, lambda: self.now_s, self._lose, lambda m: self.streams.end(m))
        self.streams = HeartbeatStreams(
            self.leases,
            7,
            self.over.__contains__,
            lambda run_id: run_id not in self.deleted,
            self._drain,
            lasts_s=lasts_s,
        )

    async def open(self, who: Member, for_run: str = "") -> Worker:
        """A worker whose first beat is answered."""
        worker = self.begin(who, for_run)
        answer = await worker.answer()
        assert (answer.term, answer.num_beats) == (7, 1)
        return worker

    def begin(self, who: Member, for_run: str = "") -> Worker:
        worker = Worker()
        wire = Wire(worker.says.get, worker.hears.put, self._check)
        serving = self.streams.serve(who, RunId(for_run), BEAT, wire)
        worker.call = asyncio.create_task(serving)
        return worker

    def _check(self) -> None:
        if self.revoked:
            raise UnauthenticatedError("the certificate has been revoked")

    async def _lose(self, who: Member, reason: str, _silent_s: float) -> None:
        raise AssertionError(f"{who} is lost: {reason}")

    async def _drain(self, who: Member) -> None:
        self.drained.append(who)


async def beating() -> tuple[Rig, Member, Worker]:
    """A worker whose first beat was answered."""
    rig, a = Rig(), member("a")
    rig.leases.grant([a], RULE.ttl_s)
    return rig, a, await rig.open(a)


async def test_each_beat_renews_and_is_answered_with_the_pace() -> None:
    rig, a, worker = await beating()
    rig.now_s = 5.0
    answer = await worker.beat()
    assert (answer.num_beats, answer.interval_s, answer.lease_ttl_s) == (2, 2.0, 10.0)
    assert rig.leases.silent_s(a) == 0.0
    rig.leases.grant([member(f"w{n}") for n in range(4999)], RULE.ttl_s)
    answer = await worker.beat()
    assert answer.interval_s == 10.0
    assert answer.lease_ttl_s == RULE.pace(10.0).ttl_s
    await worker.says.put(None)
    await worker.end()
    assert rig.streams.num_open == 0


async def test_a_lease_counts_the_interval_that_the_worker_was_told_before() -> None:
    """An answer with a shorter one may not have arrived yet."""
    rig, a = Rig(), member("a")
    others = [member(f"w{n}") for n in range(4999)]
    rig.leases.grant([a, *others], RULE.ttl_s)
    worker = await rig.open(a)
    assert (await worker.beat()).interval_s == 10.0
    for other in others:
        rig.leases.drop(other)
    assert (await worker.beat()).interval_s == 2.0
    watching = asyncio.create_task(rig.leases.expire())
    rig.now_s = RULE.pace(10.0).ttl_s - 0.1  # it goes on as it was told before
    await asyncio.sleep(0)
    await worker.beat()
    rig.now_s += RULE.ttl_s - 0.1
    await asyncio.sleep(0)
    assert rig.leases.silent_s(a) is not None
    watching.cancel()


async def test_a_second_stream_of_a_worker_ends_the_first_one_in_order() -> None:
    rig, a, first = await beating()
    second = await rig.open(a)
    await first.end()
    assert rig.streams.num_open == 1
    assert (await second.beat()).num_beats == 2


async def test_release_is_said_at_once_and_again_with_each_beat() -> None:
    rig, a, b = Rig(), member("a"), member("b")
    rig.leases.grant([a, b], RULE.ttl_s)
    worker, other = await rig.open(a, "r-1"), await rig.open(b)
    assert not (await worker.beat()).released
    rig.over.add(RunId("r-1"))
    rig.streams.tell_released(RunId("r-1"))
    rig.streams.tell_released(RunId("r-2"))
    unasked = await worker.answer()
    assert (unasked.num_beats, unasked.released) == (2, True)
    assert (await worker.beat()).released
    assert not (await other.beat()).released


async def test_a_drain_is_told_once_and_a_revoked_worker_beats_no_more() -> None:
    rig, a, worker = await beating()
    for _ in range(3):
        await worker.beat(pb.HeartbeatStreamRequest(draining=True))
    assert rig.drained == [a]
    rig.revoked, rig.now_s = True, 3.0
    await worker.says.put(BEAT)
    with pytest.raises(UnauthenticatedError, match="revoked"):
        await worker.end()
    assert rig.leases.silent_s(a) == 3.0


async def test_a_later_message_names_nobody() -> None:
    beats = (
        pb.HeartbeatStreamRequest(worker_id="b"),
        pb.HeartbeatStreamRequest(incarnation="b"),
        pb.HeartbeatStreamRequest(for_run="b"),
    )
    for beat, name in zip(beats, ("worker_id", "incarnation", "for_run"), strict=True):
        rig, a, b = Rig(), member("a"), member("b")
        rig.leases.grant([a, b], RULE.ttl_s)
        rig.now_s = 5.0
        worker = await rig.open(a)
        await worker.says.put(beat)
        with pytest.raises(InvalidInputError, match=f"{name}.*first message"):
            await worker.end()
        assert rig.leases.silent_s(b) == 5.0


async def test_a_stream_that_has_lasted_is_ended_in_order() -> None:
    rig, a = Rig(lasts_s=0.0), member("a")
    rig.leases.grant([a], RULE.ttl_s)
    worker = rig.begin(a)
    assert (await worker.answer()).num_beats == 1
    await worker.end()


@pytest.mark.parametrize("close", [False, True])
async def test_all_streams_end_with_the_reason_when_nobody_leads(close: bool) -> None:
    rig, members = Rig(), [member("a"), member("b")]
    rig.leases.grant(members, RULE.ttl_s)
    workers = [await rig.open(who) for who in members]
    if close:
        await rig.streams.close()
    else:
        rig.streams.end_all(UnavailableError("stands by"))
    for worker in workers:
        with pytest.raises(UnavailableError, match="ends" if close else "stands by"):
            await worker.end()
    assert rig.streams.num_open == 0


async def test_a_flood_waits_with_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between beats that come at once the stream is not read."""
    rig, a = Rig(), member("a")
    rig.leases.grant([a], RULE.ttl_s)
    pauses: list[float] = []
    sleep: Callable[[float], object] = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)  # type: ignore[misc]

    monkeypatch.setattr(asyncio, "sleep", note)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 5.0)  # all come at once
    worker = await rig.open(a)
    for _ in range(10):
        await worker.says.put(BEAT)
    for _ in range(10):
        await worker.answer()
    assert pauses == [pytest.approx(LEAST_GAP_S)] * 10
