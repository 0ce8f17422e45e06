"""The leader's clock: the only time that decisions are made by.

It starts at the last journaled value and advances only while this coordinator leads and runs. So an
outage of any length expires nothing, and neither does a time in which the process was frozen (a
paused container, a suspended machine): no heartbeat could have arrived. It does not read the wall
clock and cannot jump.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

STEP_S: Final = 0.5
"""Seconds by which the clock advances at most between two readings: the rest was a freeze."""


class LeaderClock:
    """A clock of the seconds led since the journal began; a new one is made at every takeover."""

    def __init__(self, start_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._now_s = start_s
        self._seen_s = monotonic()

    def now(self) -> float:
        """Return the leader-clock time, in seconds."""
        seen_s = self._monotonic()
        self._now_s += min(seen_s - self._seen_s, STEP_S)
        self._seen_s = seen_s
        return self._now_s

    async def run(self) -> None:
        """Read the clock often enough that only a freeze is left out, until cancelled."""
        while True:
            self.now()
            await asyncio.sleep(STEP_S / 4)
