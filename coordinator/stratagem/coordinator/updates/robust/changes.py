"""What whole updates have in common: inner products and lengths of their changes.

The change of an update is all its floating elements less those of the state that it began from, as
one vector in float64; what is not finite in both has not changed. float32 would find distances of
0 between updates that differ.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from stratagem.common.tensors.manifest import Manifest, TensorSpec, dtype_named
from stratagem.coordinator.updates.numpy_floats import Wide, storage, widen
from stratagem.coordinator.updates.state_reader import StateReader
from stratagem.coordinator.updates.update_sources import Source

Matrix = NDArray[np.float64]

_ELEMENTS_IN_MEMORY: Final = 1 << 22
_BLOCK: Final = 1 << 16


def gram(
    sources: Sequence[Source],
    manifest: Manifest,
    base: StateReader,
    should_stop: Callable[[], None],
) -> Matrix:
    """Return the inner products of all changes with each other, in order of the updates.

    Blocks of them are multiplied one after the other, by one thread of the linear algebra, so that
    equal updates give equal bits on equal machines. should_stop raises where it is to stop.
    """
    _limit_to_one_thread()
    total = np.zeros((len(sources), len(sources)))
    with np.errstate(over="ignore", invalid="ignore"):  # an update may be beyond all measure
        for block in _blocks(sources, manifest, base, should_stop):
            total += block @ block.T
    for source in sources:
        source.check()
    return total


def squared_lengths(
    sources: Sequence[Source],
    manifest: Manifest,
    base: StateReader,
    should_stop: Callable[[], None],
    is_counted: Callable[[TensorSpec], bool] = lambda _: True,
) -> Wide:
    """Return the squared length of each change, of the tensors that count."""
    total = np.zeros(len(sources))
    with np.errstate(over="ignore", invalid="ignore"):
        for block in _blocks(sources, manifest, base, should_stop, is_counted):
            total += np.square(block, out=block).sum(axis=1)
    for source in sources:
        source.check()
    return total


def squared_distances(products: Matrix) -> Matrix:
    """Return the squared distance of each update to each, of the inner products of their changes;
    infinite from those that are beyond the range of float64."""
    lengths = np.diag(products)
    with np.errstate(over="ignore", invalid="ignore"):
        found = lengths[:, None] + lengths[None, :] - 2 * products
    found = np.where(np.isnan(found), np.inf, np.maximum(found, 0.0))
    np.fill_diagonal(found, 0.0)
    return found


def _blocks(
    sources: Sequence[Source],
    manifest: Manifest,
    base: StateReader,
    should_stop: Callable[[], None],
    is_counted: Callable[[TensorSpec], bool] = lambda _: True,
) -> Iterator[Matrix]:
    """Yield the changes of some elements, a row for each update, until all have been read."""
    num_elements = min(_BLOCK, max(1, _ELEMENTS_IN_MEMORY // len(sources)))
    block = np.empty((len(sources), num_elements))

    def kind(spec: TensorSpec) -> tuple[str, bool]:
        return spec.dtype, dtype_named(spec.dtype).is_floating and is_counted(spec)

    for (dtype, counts), group in groupby(manifest.stored(), kind):
        specs = list(group)
        item_bytes = dtype_named(dtype).item_bytes
        end = specs[-1].offset + specs[-1].size_bytes
        for offset in range(specs[0].offset, end, num_elements * item_bytes):
            should_stop()
            num = min(num_elements, (end - offset) // item_bytes)
            raw = np.empty(num, storage(dtype))
            if not counts:
                for source in sources:
                    source.read(offset, raw)  # all bytes are checked
                continue
            before, rows = base.read(dtype, offset, num), block[:, :num]
            for source, row in zip(sources, rows, strict=True):
                source.read(offset, raw)
                widen(dtype, raw, row)
                row -= before
            rows[:, ~np.isfinite(before)] = 0.0
            yield rows


@cache
def _limit_to_one_thread() -> None:
    """Several threads add in an order that depends on how many there are. Never lifted: nothing
    else here uses the library, and two folds at once would lift it for each other."""
    threadpool_limits(limits=1, user_api="blas")
