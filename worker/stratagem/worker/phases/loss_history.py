"""The last losses of one kind of step, and the statistics that phase training reads from them.

Pure: no clock, no tensor. Every comparison is relative to |loss|, so that losses at and below zero
mean the same as others.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from stratagem.common.numerics.rules import CURRENT

MAX_LOSSES: Final = 1000
SPIKE_DEVIATIONS: Final = 3.0
DIVERGENCE_SHARE: Final = 0.2
SIGNIFICANT_ERRORS: Final = 2.0
_LEAST_HALF: Final = 4
# Losses that do not vary at all have no deviation to measure by; rounding is no spike.
_LEAST_DEVIATION: Final = 1e-6


@dataclass(frozen=True, slots=True)
class LossSummary:
    """Statistics of all losses kept. variance: of the population."""

    mean: float
    variance: float
    deviation: float
    least: float
    most: float
    median: float


class Rise(NamedTuple):
    """A rise of the mean loss between two neighbouring windows."""

    window: int
    """Losses in each."""
    change: float
    """(newer − older) / |older| of their means."""


@dataclass(frozen=True, slots=True)
class LossHistory:
    """Losses, oldest first; at most `capacity` of them."""

    losses: tuple[float, ...] = ()
    capacity: int = MAX_LOSSES

    def recorded(self, loss: float) -> "LossHistory":
        """Returns the history with one more loss, and without the oldest if there is no room."""
        return LossHistory((*self.losses, loss)[-self.capacity :], self.capacity)

    def summary(self) -> LossSummary | None:
        """Returns the statistics of all losses; None without losses."""
        if not self.losses:
            return None
        variance = statistics.pvariance(self.losses)
        return LossSummary(
            mean(self.losses),
            variance,
            math.sqrt(variance),
            min(self.losses),
            max(self.losses),
            statistics.median(self.losses),
        )

    def rolling_average(self, window: int) -> float | None:
        """Returns the mean of the last `window` losses; None while there are fewer."""
        return mean(self.losses[-window:]) if len(self.losses) >= window else None

    def change(self, window: int) -> float | None:
        """Returns (newer − older) / |older| of the means of the last two windows; None while there
        are fewer losses. An older mean of zero counts as the least positive number."""
        if len(self.losses) < 2 * window:
            return None
        older, newer = mean(self.losses[-2 * window : -window]), mean(self.losses[-window:])
        return _relative(newer - older, older)

    def is_converging(self, threshold: float) -> bool:
        """Returns whether the mean of the newer half is below that of the older by more than this
        share of it."""
        change = self.change(len(self.losses) // 2) if len(self.losses) >= 2 else None
        return change is not None and -change > threshold

    def is_diverging(self, window: int, numerics: int = CURRENT) -> bool:
        """Returns whether the loss has risen by more than a fifth; see `rise`."""
        return self.rise(window, DIVERGENCE_SHARE, numerics) is not None

    def rise(self, window: int, share: float, numerics: int = CURRENT) -> Rise | None:
        """Returns the rise between two neighbouring windows if it is more than this share; None
        otherwise.

        By the rules of `numerics` 2 longer windows are looked at, too, and halves of what there is,
        for what rises slowly: there the rise must be more than twice its standard error, and
        continue in the last windows at half its speed at least.
        """
        change = self.change(window)
        if change is not None and change > share:
            return Rise(window, change)
        for size in self._longer_windows(window) if numerics >= 2 else ():
            slow = self.change(size)
            if slow is None or slow <= share or not self._is_significant(size):
                continue
            if change is None or change > slow * window / size / 2:
                return Rise(size, slow)
        return None

    def _longer_windows(self, window: int) -> list[int]:
        half = len(self.losses) // 2
        sizes = [window << power for power in range(1, half.bit_length()) if window << power < half]
        is_enough = len(self.losses) >= window and half >= _LEAST_HALF and half != window
        return [*sizes, half] if is_enough else sizes

    def _is_significant(self, size: int) -> bool:
        older, newer = self.losses[-2 * size : -size], self.losses[-size:]
        low, high = mean(older), mean(newer)
        # Not by squares, which overflow where the losses themselves do not yet.
        deviations = [*(loss - low for loss in older), *(loss - high for loss in newer)]
        error = math.hypot(*deviations) / size
        return high - low > SIGNIFICANT_ERRORS * error

    def is_spike(self, window: int) -> bool:
        """Returns whether the newest loss is more than three deviations above the mean of the
        `window` before it."""
        baseline = self.losses[-window - 1 : -1]
        if len(baseline) < max(window, 2):
            return False
        level = mean(baseline)
        deviation = max(statistics.pstdev(baseline), _LEAST_DEVIATION * abs(level))
        rise = self.losses[-1] - level
        return rise > 0 and rise > SPIKE_DEVIATIONS * deviation

    def improvement_rate(self) -> float | None:
        """Returns (last − first) / |first|: negative while the loss falls; None below two
        losses."""
        if len(self.losses) < 2:
            return None
        return _relative(self.losses[-1] - self.losses[0], self.losses[0])


def mean(losses: Sequence[float]) -> float:
    """Returns the exactly rounded sum divided by the count: independent of how it is added up."""
    return math.fsum(losses) / len(losses)


def _relative(difference: float, base: float) -> float:
    if difference == 0:
        return 0.0
    return difference / abs(base) if base else math.copysign(math.inf, difference)
