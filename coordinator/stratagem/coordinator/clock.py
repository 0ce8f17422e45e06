"""The leader's clock: the only time that decisions are made by.

It starts at the last journaled value and advances only while this coordinator leads, so an outage
of any length expires nothing. Knows nothing of the wall clock and cannot jump.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class LeaderClock:
    """Seconds led since the journal began; made anew at every takeover."""

    def __init__(self, start_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset_s = start_s - monotonic()

    def now(self) -> float:
        """Leader-clock time, in seconds."""
        return self._monotonic() + self._offset_s
