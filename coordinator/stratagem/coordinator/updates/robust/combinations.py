"""What a fold does in place of the weighted mean: a statistic of each element, or a weighted sum.

Reads a window of every update in client order, so memory is as many windows as there are updates,
and their order of arrival cannot matter. Of integers and bools both take the middle value, which
no minority of updates can choose.
"""

from collections.abc import Sequence
from math import fsum
from typing import Final

import numpy as np

from stratagem.coordinator.updates.numpy_floats import Raw, Wide, storage, widen
from stratagem.coordinator.updates.robust.row_statistics import Statistic, lower_median
from stratagem.coordinator.updates.robust.sorting_network import COLUMNS
from stratagem.coordinator.updates.state_reader import StateReader
from stratagem.coordinator.updates.update_sources import Source

_ELEMENTS_IN_MEMORY: Final = 1 << 22
_MAX_WINDOW: Final = 1 << 18
_NARROW: Final = frozenset({"float32", "float16", "bfloat16"})
"""The types whose values float32 holds exactly, and which are compared in it."""


def window_of(num_updates: int) -> int:
    """Return the elements of a window of which every update has one in memory."""
    return min(_MAX_WINDOW, max(COLUMNS, _ELEMENTS_IN_MEMORY // num_updates))


class StatisticOfRows:
    """A statistic of each floating element."""

    def __init__(self, num_updates: int, statistic: Statistic) -> None:
        self.window_elements = window_of(num_updates)
        self._statistic = statistic

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        """Fill `out` with the statistic of the elements from that byte on, and `raw` with
        those of the last update."""
        rows = np.empty((len(sources), out.size), np.float32 if dtype in _NARROW else np.float64)
        for source, row in zip(sources, rows, strict=True):
            source.read(offset, raw)
            widen(dtype, raw, row)
            row += 0.0  # gives all zeros one sign
        for start in range(0, out.size, COLUMNS):
            part = slice(start, start + COLUMNS)
            out[part] = self._statistic([row[part] for row in rows])

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        """Fill `out` with middle values; return so where updates differ."""
        return _middle_integers(sources, dtype, offset, out)


class WeightedSum:
    """The sum of updates by their weights, divided by that of the weights; of shortened updates,
    what is missing of each is that of the state that they began from."""

    def __init__(self, weights: Sequence[float], base: StateReader | None = None) -> None:
        """weights: of updates, in client order; with `base` the share that is left of each."""
        self.window_elements = window_of(len(weights))
        self._weights, self._base = weights, base
        self._divisor = fsum(weights) if base is None else float(len(weights))
        self._of_base = fsum(1.0 - weight for weight in weights)

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        """Fill `out` with the sum over the elements from that byte on, and `raw` with those of
        the last update."""
        term = np.empty(out.size)
        out[:] = -0.0  # which adds nothing, not even a sign
        for source, weight in zip(sources, self._weights, strict=True):
            source.read(offset, raw)
            if weight:
                widen(dtype, raw, term)
                term *= weight
                out += term
        if self._base is not None and self._of_base:
            out += self._of_base * self._base.read(dtype, offset, out.size)
        out /= self._divisor

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        """Fill `out` with middle values; return so where updates differ."""
        return _middle_integers(sources, dtype, offset, out)


def _middle_integers(sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
    rows = [np.empty(out.size, storage(dtype)) for _ in sources]
    for source, row in zip(sources, rows, strict=True):
        source.read(offset, row)
    differ = any(not np.array_equal(row, rows[0]) for row in rows[1:])
    out[:] = lower_median(rows) if differ else rows[0]
    return "the middle" if differ else ""
