"""Runs a chore once for all requests that arrive meanwhile, with a pause between two runs."""

import asyncio
import time
from collections.abc import Awaitable, Callable


class Paced:
    """A chore that runs at most once per pause, however often it is asked for; runs on the event
    loop."""

    def __init__(self, chore: Callable[[], Awaitable[None]], pause_s: float) -> None:
        """Set up without a run; pause_s: from the end of one run to the beginning of the next."""
        self._chore = chore
        self._pause_s = pause_s
        self._is_asked = False
        self._next_s = time.monotonic()
        self._lock = asyncio.Lock()

    async def ask(self) -> None:
        """Have the chore run, beginning after this call; returns at once when such a run is due
        anyway."""
        if self._is_asked:
            return
        self._is_asked = True
        async with self._lock:
            await asyncio.sleep(max(0.0, self._next_s - time.monotonic()))
            self._is_asked = False
            try:
                await self._chore()
            finally:
                self._next_s = time.monotonic() + self._pause_s
