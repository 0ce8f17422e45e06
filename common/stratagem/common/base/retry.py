"""Exponential backoff with jitter between attempts."""

import asyncio
import random
from typing import Final

_jitter: Final = random.Random()  # the shared generator belongs to the user's code


class Backoff:
    """Exponential backoff with jitter: the limit doubles from first_s to last_s, and each pause is
    random in its upper half, so that peers cut off together do not return at once."""

    def __init__(self, first_s: float, last_s: float, *, least: float = 0.5) -> None:
        """Begin with pauses of up to first_s. least: the shortest pause as a fraction of its limit;
        0 gives the most jitter."""
        self._first_s, self._last_s, self._least = first_s, last_s, least
        self._limit_s = first_s

    def reset(self) -> None:
        """Start again with the shortest pause, after an attempt that succeeded."""
        self._limit_s = self._first_s

    def next_s(self) -> float:
        """Return the length of the next pause, and lengthen the one after it."""
        pause_s = self._limit_s * _jitter.uniform(self._least, 1.0)
        self._limit_s = min(2 * self._limit_s, self._last_s)
        return pause_s

    async def pause(self) -> None:
        """Sleep for the next pause."""
        await asyncio.sleep(self.next_s())
