"""The sums of regions that are federations of their own: how one is made, and their mean.

A sum has the layout of the model with all floating tensors in float64: s = sum n_k w_k over the
region's clients in their order. Integers and bools are those of its client of most rows, the first
of equals. The mean is that of regional_mean.py over the same tree, to the bit.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from stratagem.common.tensors.manifest import (
    Manifest,
    Purpose,
    TensorSpec,
    build_manifest,
    dtype_named,
)
from stratagem.coordinator.updates.folding.fold import (
    MOST_SAMPLES,
    WINDOW_ELEMENTS,
    FoldStoppedError,
)
from stratagem.coordinator.updates.folding.regional_mean import add_up
from stratagem.coordinator.updates.numpy_floats import Raw, Wide, storage
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.update_sources import Source, WholeSource

SUM_DTYPE = "float64"


def sums_manifest(model: Manifest) -> Manifest:
    """Return the layout of a region's sum."""
    named = [(spec.name, _dtype_of_sum(spec), spec.shape) for spec in model.tensors]
    aliases = {spec.name: spec.alias_of for spec in model.tensors if spec.alias_of is not None}
    return build_manifest(named, Purpose.UPDATE, aliases=aliases)


def _dtype_of_sum(spec: TensorSpec) -> str:
    return SUM_DTYPE if dtype_named(spec.dtype).is_floating else spec.dtype


def write_sum(
    entries: Sequence[SpoolEntry],
    weights: Sequence[float],
    model: Manifest,
    write: Callable[[memoryview], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Write the data of the sum of updates, which stand in client order, window by window.

    Raises IntegrityError when the disk has damaged an update, FoldStoppedError.
    """
    sources = [WholeSource(entry) for entry in entries]
    parts = list(zip(sources, weights, strict=True))
    largest = max(range(len(weights)), key=lambda place: (weights[place], -place))
    for spec in model.stored():
        item_bytes = dtype_named(spec.dtype).item_bytes
        end = spec.offset + spec.size_bytes
        for offset in range(spec.offset, end, WINDOW_ELEMENTS * item_bytes):
            if should_stop():
                raise FoldStoppedError("the sum of the region was stopped")
            num = min(WINDOW_ELEMENTS, (end - offset) // item_bytes)
            raw = np.empty(num, storage(spec.dtype))
            if dtype_named(spec.dtype).is_floating:
                total = np.empty(num)
                with np.errstate(over="ignore", invalid="ignore"):  # the spool looks for it
                    add_up(parts, spec.dtype, offset, raw, total, np.empty(num))
            else:
                total = raw
                for place, source in enumerate(sources):
                    source.read(offset, raw)
                    total = raw.copy() if place == largest else total
            write(total.view(np.uint8).data)
    for source in sources:
        source.check()


class MeanOfSums:
    """The combination of a fold over the sums of regions, in their order."""

    def __init__(
        self,
        sums: Sequence[SpoolEntry],
        num_samples: Sequence[float],
        model: Manifest,
        integers_of: int,
    ) -> None:
        """num_samples: of all clients in each sum; integers_of: the place of the sum of which the
        integers are."""
        self.window_elements = WINDOW_ELEMENTS
        self._sources = [WholeSource(entry) for entry in sums]
        self._divisor, self._integers_of = math.fsum(num_samples), integers_of
        stored = zip(model.stored(), sums_manifest(model).stored(), strict=True)
        self._places = [(own, other) for own, other in stored if own.size_bytes]
        self._offsets = [own.offset for own, _ in self._places]
        self._end = sum(other.size_bytes for _, other in self._places)

    def floats(
        self, _sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        """Fill `out` with the mean of the elements from that byte of the model on."""
        place, part = self._place(offset), np.empty(out.size)
        for number, source in enumerate(self._sources):
            source.read(place, part if number else out)
            if number:
                out += part
        out /= self._divisor
        self._check_at(place + out.nbytes)

    def integers(self, _sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        """Fill `out` with integers or bools of one sum; return so where sums differ."""
        place, differ = self._place(offset), False
        found = [np.empty(out.size, storage(dtype)) for _ in self._sources]
        for source, values in zip(self._sources, found, strict=True):
            source.read(place, values)
            differ |= not np.array_equal(values, found[0])
        out[:] = found[self._integers_of]
        self._check_at(place + out.nbytes)
        return MOST_SAMPLES if differ else ""

    def _place(self, offset: int) -> int:
        own, other = self._places[bisect_right(self._offsets, offset) - 1]
        items = (offset - own.offset) // dtype_named(own.dtype).item_bytes
        return other.offset + items * dtype_named(other.dtype).item_bytes

    def _check_at(self, end: int) -> None:
        """Check the sums once they have been read to their end."""
        if end == self._end:
            for source in self._sources:
                source.check()
