"""The weighted mean as a sum of regions: in each the updates in client order, then the regions in
order of name, in float64, divided and rounded once.

Each region's sum depends on its own updates alone, so that it is the same wherever it is made.
"""

import math
from collections.abc import Sequence

import numpy as np

from stratagem.coordinator.updates.folding.fold import MOST_SAMPLES, WINDOW_ELEMENTS
from stratagem.coordinator.updates.numpy_floats import Raw, Wide, storage, widen
from stratagem.coordinator.updates.update_sources import Source


class RegionalMean:
    """The combination of a fold in regions; memory is two windows, whatever their number."""

    def __init__(self, regions: Sequence[Sequence[int]], weights: Sequence[float]) -> None:
        """regions: places of the updates of each; weights: samples of each update.

        A single update is multiplied and divided as well: its region does not know it is alone.
        """
        assert sorted(place for region in regions for place in region) == list(range(len(weights)))
        self.window_elements = WINDOW_ELEMENTS
        self._regions, self._factors = regions, [float(weight) for weight in weights]
        self._divisor = math.fsum(weights)
        self._largest = max(range(len(weights)), key=lambda place: (weights[place], -place))

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        """Fill `out` with the mean of the elements from that byte on, and `raw` with those of the
        last update that was read."""
        sum_of_region, term = np.empty(out.size), np.empty(out.size)
        for number, region in enumerate(self._regions):
            parts = [(sources[place], self._factors[place]) for place in region]
            add_up(parts, dtype, offset, raw, sum_of_region if number else out, term)
            if number:
                out += sum_of_region
        out /= self._divisor

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        """Fill `out` with integers or bools of the update of most samples, the first of equals;
        return so where updates differ."""
        sources[self._largest].read(offset, out)
        other, differ = np.empty(out.size, storage(dtype)), False
        for place, source in enumerate(sources):
            if place != self._largest:
                source.read(offset, other)
                differ |= not np.array_equal(other, out)
        return MOST_SAMPLES if differ else ""


def add_up(
    parts: Sequence[tuple[Source, float]], dtype: str, offset: int, raw: Raw, out: Wide, term: Wide
) -> None:
    """Fill `out` with the sum of the elements of updates times their weights, in the order given;
    `raw` and `term` are used on the way."""
    for index, (source, weight) in enumerate(parts):
        target = term if index else out
        source.read(offset, raw)
        widen(dtype, raw, target)
        target *= weight
        if index:
            out += term
