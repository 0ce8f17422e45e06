import asyncio

import pytest

from stratagem.coordinator.runtime.leadership.leader_clock import STEP_S, LeaderClock


def test_the_clock_goes_on_from_the_last_journaled_value() -> None:
    time_s = 5000.0
    clock = LeaderClock(12.5, lambda: time_s)
    assert clock.now() == 12.5
    for _ in range(8):
        time_s += STEP_S / 2
        clock.now()
    assert clock.now() == 12.5 + 4 * STEP_S


def test_of_a_freeze_the_clock_counts_one_step() -> None:
    time_s = 5000.0
    clock = LeaderClock(12.5, lambda: time_s)
    time_s += 3600.0
    assert clock.now() == 12.5 + STEP_S


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
