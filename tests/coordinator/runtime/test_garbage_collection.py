"""Garbage is collected in portions: what is new at once, and the rest once there is much of it."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from stratagem.coordinator.core.world import World
from stratagem.coordinator.runtime.memory import GROWTH, LEAST_BLOCKS, Portions, small_portions


class Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    """Nothing is collected but what the tests collect."""
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def test_what_is_new_is_collected_with_the_next_portion() -> None:
    portions = Portions(lambda: 0)
    circle = weakref.ref(Circle())
    assert circle() is not None
    portions.collect()
    assert circle() is None


@pytest.mark.parametrize(("at_first", "num_times"), [(0, 1), (2 * LEAST_BLOCKS, 2)])
def test_what_was_set_aside_is_collected_each_time_the_process_has_grown_by_half(
    at_first: int, num_times: int
) -> None:
    num_blocks = at_first
    portions = Portions(lambda: num_blocks)
    for times in range(1, num_times + 1):
        held = Circle()
        portions.collect()
        circle = weakref.ref(held)
        del held
        limit = int(GROWTH**times * max(at_first, LEAST_BLOCKS))
        num_blocks = limit - 1
        portions.collect()
        assert circle() is not None
        num_blocks = limit
        portions.collect()
        assert circle() is None


def test_what_no_circle_refers_to_is_freed_though_it_was_set_aside() -> None:
    portions, world = Portions(lambda: 0), World({}, {})
    seen = world.under(2)
    assert seen.usable() == []
    portions.collect()
    gone = weakref.ref(world), weakref.ref(seen)
    del world, seen
    assert [each() for each in gone] == [None, None]


async def test_portions_are_collected_until_the_process_ends() -> None:
    freed = asyncio.Event()
    async with small_portions(pause_s=0.001):
        weakref.finalize(Circle(), asyncio.get_running_loop().call_soon_threadsafe, freed.set)
        await freed.wait()
        assert gc.get_freeze_count() > 0
