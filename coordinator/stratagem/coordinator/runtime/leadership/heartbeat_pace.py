"""How often workers beat and how long their leases are: a function of how many are alive.

A beat costs the coordinator the same whoever sends it, so thousands of workers beat more seldom and
their leases grow with the interval. Pure: the number alive comes in, the two spans come out.
"""

from dataclasses import dataclass
from typing import Final

from stratagem.common.process.process import HEARTBEATS_PER_TTL

BEATS_PER_S: Final = 500.0
"""The interval grows when workers would send more than this, all of them together."""
LONGEST_INTERVAL_S: Final = 10.0
"""What the number of workers alone makes of the interval at most."""


@dataclass(frozen=True, slots=True)
class HeartbeatPace:
    """How often a worker beats, and after which silence it is lost; both in seconds."""

    interval_s: float
    ttl_s: float


@dataclass(frozen=True, slots=True)
class PaceRule:
    """The pace of a few workers, from which that of many follows; both in seconds."""

    shortest_s: float
    ttl_s: float

    def of(self, num_alive: int) -> HeartbeatPace:
        """Return the pace for a number of workers. A lease outlives as many late beats as that of a
        few workers does, in beats and in seconds."""
        many_s = min(num_alive / BEATS_PER_S, LONGEST_INTERVAL_S)
        return self.pace(max(self.shortest_s, many_s))

    def pace(self, interval_s: float) -> HeartbeatPace:
        """Return the pace with an interval that is at least the shortest one."""
        more_s = interval_s - self.shortest_s
        return HeartbeatPace(interval_s, self.ttl_s + HEARTBEATS_PER_TTL * more_s)
