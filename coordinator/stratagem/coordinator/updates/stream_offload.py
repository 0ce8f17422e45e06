"""Runs a blocking sink in a thread, a few pieces behind the stream that feeds it.

Checking and writing then overlap with receiving, and the event loop stays free. The stream waits
when the thread falls behind, so memory is bounded. Created and used on the event loop.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from stratagem.common.tensors.stream import Data, Sink

MAX_PIECES_BEHIND: Final = 2


class Offload:
    """A sink that passes data to another one in a thread; keep_up and finish raise the errors of
    that one."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[tuple[int, Any]] = deque()
        self._worker: asyncio.Future[None] | None = None
        self._has_room = asyncio.Event()
        self._is_held_up = False

    def write(self, offset: int, data: Any) -> None:
        """Queue the next piece; returns at once."""
        self._pieces.append((offset, data))
        self._ensure_worker()

    async def keep_up(self) -> None:
        """Wait until few pieces are waiting. Raises what the sink raised."""
        self._check()
        if len(self._pieces) <= MAX_PIECES_BEHIND:
            return
        self._has_room.clear()
        self._is_held_up = True
        while len(self._pieces) > MAX_PIECES_BEHIND // 2:
            self._ensure_worker()
            assert self._worker is not None
            room = asyncio.ensure_future(self._has_room.wait())
            await asyncio.wait((room, self._worker), return_when=asyncio.FIRST_COMPLETED)
            room.cancel()
            self._check()
        self._is_held_up = False

    async def take(self, offset: int, pieces: Iterator[Data]) -> None:
        """Pass on all that an iterator gives, which runs in the thread; nothing may be waiting.
        Raises what it or the sink raised."""
        self._worker = self._loop.run_in_executor(None, self._pass_on, offset, pieces)
        await asyncio.shield(self._worker)

    async def finish(self) -> None:
        """Wait until all pieces are written. Raises what the sink raised."""
        while self._pieces or (self._worker is not None and not self._worker.done()):
            self._ensure_worker()
            assert self._worker is not None
            # Cancelling the waiting must not make a running thread look as if it had ended.
            await asyncio.shield(self._worker)
        self._check()

    async def close(self) -> None:
        """Finish the piece that is being written and drop the others; the sink is free
        afterwards."""
        self._pieces.clear()
        if self._worker is not None:
            await asyncio.wait((self._worker,))

    def _pass_on(self, offset: int, pieces: Iterator[Data]) -> None:
        for piece in pieces:
            self._sink(offset, piece)
            offset += len(piece)

    def _ensure_worker(self) -> None:
        if self._worker is None or (self._worker.done() and self._worker.exception() is None):
            self._worker = self._loop.run_in_executor(None, self._work)

    def _check(self) -> None:
        if self._worker is not None and self._worker.done():
            self._worker.result()

    def _work(self) -> None:
        """Write until nothing is waiting; a piece stays in the queue while it is written."""
        while self._pieces:
            try:
                offset, data = self._pieces[0]
            except IndexError:  # dropped meanwhile
                return
            self._sink(offset, data)
            try:
                self._pieces.popleft()
            except IndexError:
                return
            if self._is_held_up and len(self._pieces) <= MAX_PIECES_BEHIND // 2:
                self._loop.call_soon_threadsafe(self._has_room.set)
