"""The state moved by a multiple of each client's change, window by window:

    x <- x + Σ factor_k · (x_k - x)       for every trained floating parameter, in float64

The factors need not add up to one. So buffers (running statistics) and frozen parameters are
averaged by weights of their own: a sum of changes could leave their range. Integers and bools are
those of one client. Knows nothing of rounds, and not why the factors are what they are.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.updates.numpy_floats import (
    Raw,
    Wide,
    storage,
    widen,
)
from stratagem.coordinator.updates.state_reader import StateReader, averaged_names
from stratagem.coordinator.updates.update_sources import Source
from stratagem.coordinator.updates.weighing.pieces import pieces, runs_of

_WINDOW_ELEMENTS: Final = 1 << 18


class Shares(NamedTuple):
    """What each update counts, in client order."""

    factors: Sequence[float]
    """Of the changes of trained parameters."""
    means: Sequence[float]
    """Of buffers and frozen parameters, whose sum is divided by `divisor`."""
    divisor: float
    largest: int
    """The place of the update of which integers and bools are taken."""


class ScaledChanges:
    """The combination of a fold that moves the state by multiples of changes; memory is some
    windows, whatever the number of updates."""

    def __init__(self, shares: Shares, manifest: Manifest, base: StateReader) -> None:
        self._shares, self._base = shares, base
        self.window_elements = _WINDOW_ELEMENTS
        averaged = averaged_names(manifest)
        self._runs = runs_of(manifest, lambda spec: spec.name not in averaged)

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        """Fill `out` with the next state from that byte on, and `raw` with the elements of the
        last update."""
        base, term = self._base.read(dtype, offset, out.size), np.empty(out.size)
        is_fixed = ~np.isfinite(base)  # what is infinite stays so: its change is no number
        parts = pieces(self._runs, dtype, offset, out.size)
        out[:] = -0.0  # which adds nothing, not even a sign
        for place, source in enumerate(sources):
            source.read(offset, raw)
            widen(dtype, raw, term)
            for part, is_trained in parts:
                values = term[part]
                if is_trained:
                    values -= base[part]
                    values[is_fixed[part]] = 0.0
                    values *= self._shares.factors[place]
                else:
                    values *= self._shares.means[place]
            out += term
        for part, is_trained in parts:
            if is_trained:
                out[part] += base[part]
            else:
                out[part] /= self._shares.divisor

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        """Fill `out` with integers or bools of one update; no other is asked."""
        kept = np.empty(out.size, storage(dtype))
        for place, source in enumerate(sources):
            source.read(offset, kept)
            if place == self._shares.largest:
                out[:] = kept
        return ""
