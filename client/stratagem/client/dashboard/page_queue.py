"""What waits for one reader of an event stream: up to a number of messages, then it is cut."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

MAX_WAITING: Final = 1000
"""Messages that wait for a reader who does not take them."""


class PageQueue:
    """Messages to one reader. Of progress only the latest waits; one that is full is over, and the
    reader comes back with the number of the last event it has seen."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._waiting: deque[bytes] = deque()
        self._latest: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self.is_cut = False

    def put(self, message: bytes) -> None:
        """Add a message; the queue is cut when too many wait."""
        if len(self._waiting) >= self._max_waiting:
            self.is_cut = True
        else:
            self._waiting.append(message)
        self._changed.set()

    def replace(self, kind: str, message: bytes) -> None:
        """Add a message of which only the latest counts."""
        self._latest[kind] = message
        self._changed.set()

    async def room(self) -> None:
        """Wait until at most half of the places are taken: of a past that is not in a hurry."""
        while len(self._waiting) > self._max_waiting // 2 and not self.is_cut:
            self._taken.clear()
            await self._taken.wait()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the messages as they come, until the queue is cut."""
        while not self.is_cut:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting and not self.is_cut:
                yield self._waiting.popleft()
                self._taken.set()
            latest, self._latest = self._latest, {}
            for message in latest.values():
                yield message
