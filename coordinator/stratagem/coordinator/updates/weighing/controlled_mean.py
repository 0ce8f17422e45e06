"""The fold of SCAFFOLD, option II (Karimireddy et al., 2020, arXiv:1910.06378), window by window:

    x <- Σ x_k / |S|              over the clients of the round, S
    c <- c + Σ Δc_k / N           of the tensors `control/...`; N is the number of all clients

in client order, in float64, rounded once. So c stays the mean of what all clients keep. Knows
nothing of rounds.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from stratagem.common.tensors.manifest import CONTROL, Manifest
from stratagem.coordinator.updates.numpy_floats import Raw, Wide, storage, widen
from stratagem.coordinator.updates.state_reader import StateReader
from stratagem.coordinator.updates.update_sources import Source
from stratagem.coordinator.updates.weighing.pieces import pieces, runs_of

_WINDOW_ELEMENTS: Final = 1 << 18


class ControlledMean:
    """The combination of a fold whose clients were corrected; memory is some windows, whatever the
    number of updates."""

    def __init__(
        self,
        rows: Sequence[float],
        num_clients: int,
        manifest: Manifest,
        base: StateReader,
        *,
        begins_anew: bool,
    ) -> None:
        """rows: of the clients of the round; integers are those of the client with most.
        num_clients: of the federation. begins_anew: c becomes zero."""
        self._largest, self._num_clients = rows.index(max(rows)), num_clients
        self._base, self._begins_anew = base, begins_anew
        self.window_elements = _WINDOW_ELEMENTS
        self._runs = runs_of(manifest, lambda spec: spec.name.startswith(CONTROL))

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        """Fill `out` with the next state from that byte on, and `raw` with the elements of the
        last update."""
        term = np.empty(out.size)
        out[:] = -0.0  # which adds nothing, not even a sign
        for source in sources:
            source.read(offset, raw)
            widen(dtype, raw, term)
            out += term
        for part, is_control in pieces(self._runs, dtype, offset, out.size):
            if not is_control:
                out[part] /= len(sources)
            elif self._begins_anew:
                out[part] = 0.0
            else:
                start = offset + part.start * raw.itemsize
                before = self._base.read(dtype, start, part.stop - part.start)
                out[part] = before + out[part] / self._num_clients

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        """Fill `out` with integers or bools of one update; no other is asked."""
        kept = np.empty(out.size, storage(dtype))
        for place, source in enumerate(sources):
            source.read(offset, kept)
            if place == self._largest:
                out[:] = kept
        return ""
