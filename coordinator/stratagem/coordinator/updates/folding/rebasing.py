"""Rebases updates of earlier rounds for a fold: applies their changes to the present state.

    x_k <- (x_k - base_k) + x        in float64, for every trained floating parameter

A whole model of an earlier round would pull the state back to where it was then; its change does
not. Buffers (running statistics) and frozen parameters enter as they are: a sum of changes could
leave their range, a variance below zero for one. What was not finite in the base of an update has
no change: it takes the number of the present state. Memory is some windows. Knows nothing of
rounds.
"""

from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np

from stratagem.common.base.ids import Digest
from stratagem.common.tensors.manifest import TensorSpec, dtype_named
from stratagem.coordinator.store.blobs.blob_store import BlobStore
from stratagem.coordinator.updates.numpy_floats import Wide
from stratagem.coordinator.updates.state_reader import averaged_names, open_state


class Rebasing:
    """The rebasing of one fold's late updates; states are read at the offsets of its windows."""

    def __init__(self, store: BlobStore, state: Digest, bases: Mapping[int, Digest]) -> None:
        """Open the states; bases: the base state of each late update, by its place among the
        updates."""
        with ExitStack() as files:
            opened = {
                digest: open_state(files, store, digest) for digest in {state, *bases.values()}
            }
            self._files = files.pop_all()
        manifest, self._state = opened[state]
        self._averaged = averaged_names(manifest)
        self._bases = {index: opened[digest][1] for index, digest in bases.items()}

    def is_late(self, index: int) -> bool:
        return index in self._bases

    def is_rebased(self, spec: TensorSpec) -> bool:
        """Return True for parameters that are trained."""
        return dtype_named(spec.dtype).is_floating and spec.name not in self._averaged

    def apply(
        self, index: int, dtype: str, offset: int, values: Wide, *, is_rebased: bool = True
    ) -> None:
        """Rebase one window of an update in place; offset: of the window in the state. is_rebased:
        see above; other floating numbers only lose what was not finite in their base."""
        if index not in self._bases:
            return
        if not is_rebased:
            lost = ~np.isfinite(values)  # it was accepted because it has the bits of its base
        else:
            before = self._bases[index].read(dtype, offset, values.size)
            lost = ~np.isfinite(before)
            values -= before
        if not is_rebased and not lost.any():
            return
        state = self._state.read(dtype, offset, values.size)
        if is_rebased:
            values += state
        np.copyto(values, state, where=lost)

    def close(self) -> None:
        self._files.close()
