"""Runs a blocking sink in a thread of its own, a few pieces behind the stream that feeds it.

Hashing and writing then overlap with receiving, and the event loop stays free. The stream waits
when the thread falls behind, so memory is bounded. Made and used on the event loop.
"""

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from stratagem.common.tensors.chunks import Sink

MAX_PIECES_BEHIND: Final = 4


class Offload:
    """A sink like the one that it wraps, whose errors come out of keep_up and finish."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sink")
        self._under_way: deque[asyncio.Future[None]] = deque()

    def write(self, offset: int, data: bytes) -> None:
        """Hand over the next piece; returns at once."""
        done = self._loop.run_in_executor(self._thread, self._sink, offset, data)
        self._under_way.append(done)

    async def keep_up(self) -> None:
        """Wait until few pieces are under way. Raises what the sink raised."""
        while len(self._under_way) > MAX_PIECES_BEHIND:
            await self._under_way.popleft()

    async def finish(self) -> None:
        """Wait until all pieces are written. Raises what the sink raised."""
        while self._under_way:
            await self._under_way.popleft()

    async def close(self) -> None:
        """Let the piece in hand be written and drop the others; the sink is free afterwards."""
        for piece in self._under_way:
            piece.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._under_way.clear()
        # The thread may still be inside the one piece that could not be cancelled.
        await asyncio.to_thread(self._thread.shutdown)
