import asyncio
import time

from stratagem.coordinator.clock import STEP_S, LeaderClock


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


async def test_an_idle_process_is_not_a_frozen_one() -> None:
    clock = LeaderClock(0.0)
    running = asyncio.create_task(clock.run())
    started_s = time.monotonic()
    await asyncio.sleep(2 * STEP_S)
    passed_s, counted_s = time.monotonic() - started_s, clock.now()
    assert passed_s - STEP_S / 2 <= counted_s <= passed_s + 0.01
    time.sleep(3 * STEP_S)  # noqa: ASYNC251  (frozen)
    assert clock.now() - counted_s <= STEP_S
    running.cancel()
