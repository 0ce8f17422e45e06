"""The leases of workers, which end when nothing is heard of them."""

import asyncio
import time

from stratagem.common.base.ids import Incarnation, WorkerId
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.runtime.leadership.heartbeat_leases import Leases
from stratagem.coordinator.runtime.leadership.heartbeat_pace import PaceRule
from stratagem.coordinator.runtime.leadership.leader_clock import STEP_S, LeaderClock
from tests.patience import PATIENCE_S


def member(name: str) -> Member:
    return Member(worker_id=WorkerId(name), incarnation=Incarnation(name))


async def test_silent_member_is_lost_and_a_beating_one_is_not() -> None:
    now = [0.0]
    lost: list[tuple[Member, str, float]] = []
    told = asyncio.Event()

    async def lose(who: Member, reason: str, silent_s: float) -> None:
        lost.append((who, reason, silent_s))
        told.set()

    leases = Leases(PaceRule(2.0, 10.0), lambda: now[0], lose)
    leases.grant([member("a"), member("b")], 10.0)
    now[0] = 6.0
    assert leases.renew(member("b"), 10.0)
    now[0] = 11.0
    watching = asyncio.create_task(leases.expire())
    async with asyncio.timeout(PATIENCE_S):
        await told.wait()
    watching.cancel()
    assert lost == [(member("a"), "no heartbeat for 10 s", 11.0)]
    assert not leases.renew(member("a"), 10.0)
    assert leases.silent_s(member("b")) == 5.0


async def test_no_lease_runs_while_the_process_is_frozen() -> None:
    ttl_s = 2 * STEP_S
    lost: list[tuple[Member, float]] = []
    told = asyncio.Event()

    async def lose(who: Member, reason: str, _silent_s: float) -> None:
        lost.append((who, time.monotonic()))
        told.set()

    clock = LeaderClock(0.0)
    leases = Leases(PaceRule(0.1, ttl_s), clock.now, lose)
    granted_s = time.monotonic()
    leases.grant([member("a")], ttl_s)
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

    async def lose(who: Member, reason: str, _silent_s: float) -> None:
        lost.append(who)
        has_lost.set()

    now_s = 0.0
    leases = Leases(PaceRule(0.01, 0.05), lambda: now_s, lose)
    leases.grant([member("a"), member("b")], 0.05)
    leases.suspend()
    now_s = 100.0
    expiring = asyncio.create_task(leases.expire())
    await asyncio.sleep(0)
    assert lost == []
    leases.resume()
    now_s = 100.04
    assert leases.renew(member("a"), 0.05)
    now_s = 100.06
    async with asyncio.timeout(PATIENCE_S):
        await has_lost.wait()
    expiring.cancel()
    assert lost == [member("b")]


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
