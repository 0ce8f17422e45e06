"""When the coordinator of a run was away: it had crashed, was started anew, or stood still.

Events have two times: that of the wall, and that of the leader's clock, which goes on only while a
coordinator leads and runs, and which begins again, after a crash, at the last time that was
journaled. What the wall's clock has gained on it from one event to the next is how long nobody led;
it may begin as early as the event before, so it is that long at most.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from stratagem.client.course.payloads import ENDS
from stratagem.client.course.shapes import EventLike

MIN_AWAY_S: Final = 2.0
"""Shorter ones are not told: a busy machine stands still for as long."""
MAX_OUTAGES: Final = 1000
"""The newest ones are kept."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A stretch of wall time in which no coordinator led; it may have begun later."""

    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        """Return how long it was at most."""
        return self.ended_s - self.began_s


class OutagesFolding:
    """The outages while the events of a run are read."""

    def __init__(self) -> None:
        self.outages: deque[Outage] = deque(maxlen=MAX_OUTAGES)
        self._before: EventLike | None = None

    def fold(self, event: EventLike) -> Outage | None:
        """Take the next event of the run; return the outage before it, if there was one."""
        before, self._before = self._before, event
        if before is None or before.kind in ENDS:
            return None  # a run that rests misses nobody
        led_from_s, led_to_s = (getattr(each, "leader_s", 0.0) for each in (before, event))
        if not led_from_s or not led_to_s:
            return None  # a coordinator of an older version does not tell
        away_s = (event.time_s - before.time_s) - max(led_to_s - led_from_s, 0.0)
        if away_s < MIN_AWAY_S:
            return None
        outage = Outage(before.time_s, before.time_s + away_s)
        self.outages.append(outage)
        return outage
