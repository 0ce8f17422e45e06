"""One step of a server optimizer during a fold: reads and writes its files window by window.

Owns the files of the slots: one blob per slot, the optimized tensors in the order of the model, in
float32 (float64 where the tensor is float64). They belong to the committed state, but no worker or
client ever gets them. Knows nothing of rounds; memory is some windows.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import (
    Manifest,
    Purpose,
    TensorSpec,
    build_manifest,
    dtype_named,
)
from stratagem.coordinator.store.blobs.blob_store import BlobStore, BlobWriter
from stratagem.coordinator.updates.folding.finite_result import SERVER, FiniteResult, Rule
from stratagem.coordinator.updates.folding.server_optimizers import ServerOptimizer
from stratagem.coordinator.updates.numpy_floats import (
    Wide,
    finite_elements,
    is_finite,
    narrow,
    storage,
)
from stratagem.coordinator.updates.state_reader import averaged_names, open_state


def slot_dtype(dtype: str) -> str:
    """Return the type in which a slot of a tensor is kept."""
    return "float64" if dtype == "float64" else "float32"


class ServerStep:
    """The step from x toward the mean. Must be applied to all windows of all optimized tensors, in
    order."""

    def __init__(
        self,
        optimizer: ServerOptimizer,
        store: BlobStore,
        base: Digest,
        slots: Sequence[Digest],
        metadata: dict[str, str],
        rule: Rule = SERVER,
    ) -> None:
        """Open the files; base: the present state; slots: of the optimizer, in its order; none
        before round 1. rule: the optimizer, for people."""
        self._optimizer, self.rule = optimizer, rule
        with ExitStack() as files:
            manifest, self._x = open_state(files, store, base)
            self._slots = [open_state(files, store, digest)[1] for digest in slots]
            self._files = files.pop_all()
        self._averaged, self._finite = averaged_names(manifest), FiniteResult(manifest, rule)
        self._slot_offset = 0
        self._writers = self._open_writers(store, manifest, metadata)

    def is_optimized(self, spec: TensorSpec) -> bool:
        """Return True for parameters that are trained; buffers and frozen parameters are
        averaged."""
        return dtype_named(spec.dtype).is_floating and spec.name not in self._averaged

    def apply(self, dtype: str, offset: int, mean: Wide) -> None:
        """Replace the mean of one window by the next x; offset: of the window in the state. Raises
        DivergedError where a slot leaves the range of its type."""
        x = self._x.read(dtype, offset, mean.size)
        kept_as = slot_dtype(dtype)
        before = self._read_slots(kept_as, mean.size)
        delta = mean - x
        if not np.isfinite(delta).all():
            delta[~np.isfinite(x)] = 0.0  # what is infinite stays so: its change is no number
        after, change = self._optimizer.step(before, delta)
        np.add(x, change, out=mean)
        for values, writer in zip(after, self._writers, strict=True):
            kept = np.empty(values.size, storage(kept_as))
            narrow(kept_as, values, kept)
            if not is_finite(kept_as, kept):
                place = int(np.argmin(finite_elements(kept_as, kept)))
                self._finite.refuse(dtype, offset, place, kept_as=kept_as)
            writer.write(kept.view(np.uint8).data)
        self._slot_offset += mean.size * dtype_named(kept_as).item_bytes

    def commit(self) -> tuple[Digest, ...]:
        """Make the slots durable and return their digests, in the optimizer's order."""
        self._files.close()
        return tuple(writer.commit() for writer in self._writers)

    def abort(self) -> None:
        """Discard what was written."""
        self._files.close()
        for writer in self._writers:
            writer.abort()

    def _read_slots(self, dtype: str, num: int) -> tuple[Wide, ...]:
        if not self._slots:
            return tuple(np.full(num, first) for first in self._optimizer.initial.values())
        return tuple(slot.read(dtype, self._slot_offset, num) for slot in self._slots)

    def _open_writers(
        self, store: BlobStore, manifest: Manifest, metadata: dict[str, str]
    ) -> list[BlobWriter]:
        optimized = [spec for spec in manifest.stored() if self.is_optimized(spec)]
        layout = build_manifest(
            [(spec.name, slot_dtype(spec.dtype), spec.shape) for spec in optimized], Purpose.STATE
        )
        writers = []
        for name in self._optimizer.initial:
            header = header_bytes(replace(layout, metadata={**metadata, "slot": name}))
            writers.append(store.writer(len(header) + layout.total_bytes))
            writers[-1].write(header)
        return writers
