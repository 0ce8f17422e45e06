"""Define metrics as data, by name and meaning, and measure the lag of the event loop."""

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

# ---- Definitions ----
#
# The scrape, the documentation and the tests use the same definitions. Values are plain numbers
# that the process keeps anyway or adds up as it goes; they do not depend on Prometheus' text
# format.

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a metric. Its labels are few and low-cardinality: no run id, no path,
    nothing that a caller chooses."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()


class Durations:
    """A histogram of durations in seconds, with fixed buckets. One thread at a time adds; any may
    read, at worst one observation behind."""

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        """Make an empty histogram. bounds_s: ascending upper bounds; longer durations are counted
        separately."""
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Add one duration. A negative one, from a clock that went backwards, counts as 0."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += max(seconds, 0.0)

    def cumulative(self) -> list[tuple[str, int]]:
        """Return (upper bound, number of durations up to it) per bucket; the last is +Inf."""
        total, rows = 0, []
        for bound, count in zip([*map(str, self.bounds_s), "+Inf"], self.counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows


Value = float | Durations
Values = Mapping[tuple[str, ...], Value]
"""The values of a metric, keyed by the tuple of its label values in the order of the definition."""
Readings = Iterable[tuple[Metric, Values]]


def one(value: Value) -> Values:
    """Return a single value as the Values of a metric without labels."""
    return {(): value}


# ---- Event loop lag ----
#
# Everything that must answer soon waits for the event loop. A task sleeps a fixed time and measures
# how much longer it took. A blocked loop and a frozen process show as one long lag.

INTERVAL_S: Final = 0.25
BOUNDS_S: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class LoopLag:
    """A meter of the event loop's lag: the delay from a task's planned start to its actual one."""

    def __init__(self) -> None:
        self.seconds = Durations(BOUNDS_S)

    async def run(self) -> None:
        """Measure the lag until cancelled; must run as a task on the event loop to measure."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.seconds.add(loop.time() - due_s)
