"""The average of the global parameters over rounds, during a fold: a state beside the next state.

It has the layout of the state, and all of it but the trained parameters, in whose place their
averages stand; so whatever evaluates or downloads a state takes an average as it is. Memory is some
windows. Knows nothing of updates and of effects.
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import numpy as np

from stratagem.common.base.ids import Digest
from stratagem.common.job import WeightAverageSpec
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import NUM_AVERAGED_KEY, Manifest, TensorSpec, dtype_named
from stratagem.coordinator.store.blobs.blob_store import BlobStore
from stratagem.coordinator.updates.folding.finite_result import AVERAGE, FiniteResult
from stratagem.coordinator.updates.numpy_floats import Raw, narrow, storage, widen
from stratagem.coordinator.updates.state_reader import StateReader, averaged_names, open_state

_UNCHANGED: Final = 0.0


class GlobalAverage:
    """The average after a round. Must be given all windows of the next state, in order.

    average + weight · (parameter − average) in float64, of the parameters as they are stored, and
    rounded once to their type.
    """

    def __init__(self, store: BlobStore, before: Digest, manifest: Manifest, weight: float) -> None:
        """Open the files. before: the average until now; empty before its first update, which takes
        the parameters as they are. manifest: of the next state. weight: of its parameters."""
        self._files, self._weight = ExitStack(), weight
        self._finite = FiniteResult(manifest, AVERAGE)
        self._before: StateReader | None = None
        with self._files:
            num_averaged = 0
            if before:
                earlier, self._before = open_state(self._files, store, before)
                num_averaged = int(earlier.metadata[NUM_AVERAGED_KEY])
            num_averaged += weight != _UNCHANGED
            self._untouched = averaged_names(manifest)
            metadata = {**manifest.metadata, NUM_AVERAGED_KEY: str(num_averaged)}
            header = header_bytes(replace(manifest, metadata=metadata))
            self._writer = store.writer(len(header) + manifest.total_bytes)
            self._writer.write(header)
            self._files = self._files.pop_all()

    def is_averaged(self, spec: TensorSpec) -> bool:
        """Return True for parameters that are trained."""
        return dtype_named(spec.dtype).is_floating and spec.name not in self._untouched

    def take(self, dtype: str, offset: int, values: Raw, *, is_averaged: bool) -> None:
        """Take in one window of the next state; offset: of the window in it. Raises DivergedError
        for an average that is not finite where the state is."""
        result = values
        if self._before is not None and is_averaged:
            result = self._before.read_raw(dtype, offset, values.size)
            if self._weight != _UNCHANGED:
                result = _between(dtype, result, values, self._weight)
                self._finite.check(dtype, offset, result, before=values)
        self._writer.write(result.view(np.uint8).data)

    def commit(self) -> Digest:
        """Make it durable and return its digest."""
        self._files.close()
        return self._writer.commit()

    def abort(self) -> None:
        """Discard what was written."""
        self._files.close()
        self._writer.abort()


def global_average(
    spec: WeightAverageSpec | None,
    store: BlobStore,
    before: Digest,
    manifest: Manifest,
    round_num: int,
) -> GlobalAverage | None:
    """Return the average after a round; None where there is none yet. See GlobalAverage."""
    if spec is None or not (before or spec.is_due(round_num)):
        return None
    weight = _UNCHANGED
    if spec.is_due(round_num):
        weight = spec.weight(_num_averaged(store, before))
    return GlobalAverage(store, before, manifest, weight)


def _num_averaged(store: BlobStore, average: Digest) -> int:
    if not average:
        return 0
    with ExitStack() as files:
        return int(open_state(files, store, average)[0].metadata[NUM_AVERAGED_KEY])


def _between(dtype: str, before: Raw, after: Raw, weight: float) -> Raw:
    mean, change = np.empty(before.size), np.empty(after.size)
    widen(dtype, before, mean)
    widen(dtype, after, change)
    with np.errstate(over="ignore", invalid="ignore"):
        change -= mean
        change *= weight
        mean += change
    result = np.empty(before.size, storage(dtype))
    narrow(dtype, mean, result)
    return result
