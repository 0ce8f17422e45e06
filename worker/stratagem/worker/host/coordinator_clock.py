"""Estimates the offset between this machine's clock and the coordinator's.

With it times of different workers can be compared.

A call is answered with the coordinator's time. It was read between sending and receiving; if both
ways took equally long, in the middle. The error is at most half the round trip, so the call with
the shortest one counts (Cristian, 1989). Written on the event loop, read in the torch thread.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

NUM_KEPT: Final = 16
"""Calls that are remembered; older ones would miss a drift of the clocks."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Seconds to add to this machine's time, and how wrong that may be."""

    seconds: float = 0.0
    error_s: float = float("inf")


@dataclass(slots=True)
class CoordinatorClock:
    """Estimates the offset to the coordinator's clock from the latest readings of it."""

    _readings: deque[Offset] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    offset: Offset = Offset()
    """The best known; without any reading nothing is added."""

    def note(self, sent_s: float, received_s: float, coordinator_s: float) -> None:
        """Add a reading: our times of sending and receiving a call, and the time in its answer."""
        middle_s = (sent_s + received_s) / 2
        self._readings.append(Offset(coordinator_s - middle_s, (received_s - sent_s) / 2))
        self.offset = min(self._readings, key=lambda reading: reading.error_s)
