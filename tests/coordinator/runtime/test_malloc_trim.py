"""Memory that transfers have left free goes back to the system in the pauses between them."""

import asyncio
import subprocess
import sys

from stratagem.coordinator.runtime.memory import rest

LEAVES_HOLES = """
import os
from stratagem.common.process.process import give_back, tune_malloc

def rss_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024

os.environ.pop("LD_PRELOAD", None)  # what is preloaded is no malloc, but another clock
assert "tuned" in tune_malloc()
chunks = [bytes([n % 255 + 1]) * 2**20 for n in range(100)]
del chunks[:-1]  # what is free lies below what is not, so no top of a heap is free
before = rss_mb()
give_back()
print(before - rss_mb())
"""


async def test_it_is_given_back_once_in_each_pause() -> None:
    moved, given = 0, asyncio.Queue[int]()
    loop = asyncio.get_running_loop()

    def give_back() -> None:
        loop.call_soon_threadsafe(given.put_nowait, moved)

    resting = asyncio.create_task(rest(lambda: moved, give_back, pause_s=0.01))
    for _ in range(2):
        await asyncio.sleep(0)
        moved += 1
        assert await given.get() == moved
    resting.cancel()
    await asyncio.gather(resting, return_exceptions=True)
    assert given.empty()


def test_what_the_allocator_keeps_can_be_had_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_HOLES], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) > 80
