"""Whether what is not needed any more is freed at once: what a circle of references keeps stays
until Python's collector looks at it, which in a coordinator may take hours."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from tests.patience import PATIENCE_S

T = TypeVar("T")


class Watched:
    """Objects of which each is to be freed, on the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._freed = asyncio.Semaphore(0)
        self._num = 0

    def watch(self, thing: T) -> T:
        """Return an object that is now watched."""
        self._num += 1
        weakref.finalize(thing, self._loop.call_soon_threadsafe, self._freed.release)
        return thing

    async def until_freed(self) -> None:
        """Wait until all are freed; at least one must have been watched."""
        assert self._num > 0
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(self._num):
                await self._freed.acquire()


@contextmanager
def no_collector() -> Iterator[None]:
    """Nothing that a circle keeps is freed inside the context."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
