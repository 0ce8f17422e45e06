"""The leases of workers, which end when nothing is heard of them, and the clock of the leader."""

import asyncio
import time

import pytest

from stratagem.common.base.ids import Incarnation, WorkerId
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.runtime import loop
from stratagem.coordinator.runtime.leases import Leases, PaceRule
from stratagem.coordinator.runtime.loop import STEP_S, LeaderClock
from tests.patience import PATIENCE_S


def member(name: str) -> Member:
    return Member(worker_id=WorkerId(name), incarnation=Incarnation(name))


class Losses:
    """Who was lost, why, and after how long."""

    def __init__(self) -> None:
        self.all: list[tuple[Member, str, float]] = []
        self.told = asyncio.Event()
        self.at_s = 0.0

    async def lose(self, who: Member, reason: str, silent_s: float) -> None:
        self.all.append((who, reason, silent_s))
        self.at_s = time.monotonic()
        self.told.set()

    async def one(self) -> Member:
        async with asyncio.timeout(PATIENCE_S):
            await self.told.wait()
        ((who, *_),) = self.all
        return who


async def test_silent_member_is_lost_and_a_beating_one_is_not() -> None:
    now = [0.0]
    losses = Losses()
    leases = Leases(PaceRule(2.0, 10.0), lambda: now[0], losses.lose)
    leases.grant([member("a"), member("b")], 10.0)
    now[0] = 6.0
    assert leases.renew(member("b"), 10.0)
    now[0] = 11.0
    watching = asyncio.create_task(leases.expire())
    assert await losses.one() == member("a")
    watching.cancel()
    assert losses.all == [(member("a"), "no heartbeat for 10 s", 11.0)]
    assert not leases.renew(member("a"), 10.0)
    assert leases.silent_s(member("b")) == 5.0


async def test_no_lease_runs_while_the_process_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    step_s = 0.1
    monkeypatch.setattr(loop, "STEP_S", step_s)
    ttl_s = 2 * step_s
    losses = Losses()
    clock = LeaderClock(0.0)
    leases = Leases(PaceRule(0.1, ttl_s), clock.now, losses.lose)
    granted_s = time.monotonic()
    leases.grant([member("a")], ttl_s)
    watching = asyncio.gather(leases.expire(), clock.run())
    await asyncio.sleep(0)  # it watches
    frozen_s = time.monotonic()
    time.sleep(2 * ttl_s)  # noqa: ASYNC251  (frozen)
    frozen_s = time.monotonic() - frozen_s
    assert await losses.one() == member("a")
    watching.cancel()
    # All time but the freeze, of which the clock counts one step at most, and rounding.
    assert losses.at_s - granted_s - frozen_s >= ttl_s - step_s - 1e-6


async def test_no_lease_ends_while_nobody_can_be_heard() -> None:
    losses = Losses()
    now_s = 0.0
    leases = Leases(PaceRule(0.01, 0.05), lambda: now_s, losses.lose)
    leases.grant([member("a"), member("b")], 0.05)
    leases.suspend()
    now_s = 100.0
    expiring = asyncio.create_task(leases.expire())
    await asyncio.sleep(0)
    assert losses.all == []
    leases.resume()
    now_s = 100.04
    assert leases.renew(member("a"), 0.05)
    now_s = 100.06
    assert await losses.one() == member("b")
    expiring.cancel()


async def test_a_short_lease_ends_in_time_among_long_ones() -> None:
    """What is waited for is the first end, also of a lease that is given while one waits."""
    lost: asyncio.Queue[str] = asyncio.Queue()
    gone: list[Member] = []

    async def lose(who: Member, reason: str, _silent_s: float) -> None:
        await lost.put(f"{who.worker_id}: {reason}")

    leases = Leases(PaceRule(0.01, 0.05), time.monotonic, lose, gone.append)
    leases.grant([member("long")], 3600.0)
    expiring = asyncio.create_task(leases.expire())
    await asyncio.sleep(0)  # it waits for the end of that one
    leases.grant([member("short")], 0.05)
    async with asyncio.timeout(PATIENCE_S):
        assert await lost.get() == "short: no heartbeat for 0.05 s"
    expiring.cancel()
    assert gone == [member("short")]
    assert leases.silent_s(member("long")) is not None


async def test_those_that_are_lost_together_are_lost_at_once() -> None:
    """A loss that waits for its journal holds up no other."""
    lost: set[Member] = set()
    all_wait = asyncio.Event()

    async def lose(who: Member, reason: str, _silent_s: float) -> None:
        lost.add(who)
        if len(lost) == 100:
            all_wait.set()
        await asyncio.Event().wait()

    now_s = 0.0  # no process stands still between two of the grants
    leases = Leases(PaceRule(0.01, 0.05), lambda: now_s, lose)
    leases.grant([member(f"w{n}") for n in range(100)], 0.05)
    now_s = 0.06
    expiring = asyncio.create_task(leases.expire())
    async with asyncio.timeout(PATIENCE_S):
        await all_wait.wait()
    expiring.cancel()
    assert leases.longest_silence_s() == 0.0


def test_the_clock_goes_on_from_the_last_journaled_value_and_counts_one_step_of_a_freeze() -> None:
    time_s = 5000.0
    clock = LeaderClock(12.5, lambda: time_s)
    assert clock.now() == 12.5
    for _ in range(8):
        time_s += STEP_S / 2
        clock.now()
    assert clock.now() == 12.5 + 4 * STEP_S
    time_s += 3600.0
    assert clock.now() == 12.5 + 5 * STEP_S


async def test_an_idle_process_is_not_a_frozen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    time_s, give_way = 5000.0, asyncio.sleep

    async def sleep(duration_s: float) -> None:
        nonlocal time_s
        time_s += duration_s
        await give_way(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    clock = LeaderClock(0.0, lambda: time_s)
    running = asyncio.create_task(clock.run())
    while time_s < 5010.0:
        await give_way(0)
    assert clock.now() == pytest.approx(time_s - 5000.0)
    running.cancel()
