"""Collect garbage in small portions, and return free memory to the system between transfers.

A full collection looks at every object. With the standing calls of ten thousand workers that takes
a second, in which nothing is answered, and finds nearly nothing.
"""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

# ---- Garbage collection ----
#
# New objects are examined several times a second and then set aside (`gc.freeze`); objects
# outside reference cycles are freed all the same. Everything is examined only once the process
# has grown by half. The objects at start-up are mostly code, which a fork shares with its
# template until the collector touches it.

COLLECTION_PAUSE_S: Final = 0.25
GROWTH: Final = 1.5
"""The growth in memory blocks since the last full collection at which a full one is made again."""
LEAST_BLOCKS: Final = 500_000
"""The least block count to compare with: a small process grows by half with its first workers."""


class Portions:
    """Collects garbage in portions; remembers the block count after the last full collection."""

    def __init__(self, num_blocks: Callable[[], int] = sys.getallocatedblocks) -> None:
        """Begin to count. num_blocks: returns the number of memory blocks allocated by Python."""
        self._num_blocks = num_blocks
        self._num_left = num_blocks()

    def collect(self) -> None:
        """Collect recent objects, or all objects if the process has grown much; exempt the
        survivors from later collections of recent objects."""
        if self._num_blocks() >= GROWTH * max(self._num_left, LEAST_BLOCKS):
            gc.unfreeze()
            gc.collect()
            self._num_left = self._num_blocks()
        else:
            gc.collect(1)
        gc.freeze()


@asynccontextmanager
async def small_portions(pause_s: float = COLLECTION_PAUSE_S) -> AsyncIterator[None]:
    """Context manager that collects garbage in small portions while its body runs."""
    task = asyncio.create_task(_collect_in_portions(Portions(), pause_s))
    try:
        yield
    finally:
        task.cancel()


async def _collect_in_portions(portions: Portions, pause_s: float) -> None:
    while True:
        portions.collect()
        await asyncio.sleep(pause_s)


# ---- Allocator ----
#
# The allocator is tuned to keep freed memory (common/process/process.py), which makes transfers
# fast. The amount depends on how many chunks once waited for the disk together. In a pause that
# memory is not needed.

TRIM_PAUSE_S: Final = 10.0


async def rest(
    num_bytes_moved: Callable[[], int],
    give_back: Callable[[], object],
    pause_s: float = TRIM_PAUSE_S,
) -> None:
    """Call give_back once in every transfer pause of at least pause_s seconds, until cancelled.
    num_bytes_moved: returns the number of bytes transferred so far."""
    given = seen = num_bytes_moved()
    while True:
        await asyncio.sleep(pause_s)
        now = num_bytes_moved()
        if now == seen and now != given:
            await asyncio.to_thread(give_back)
            given = now
        seen = now
