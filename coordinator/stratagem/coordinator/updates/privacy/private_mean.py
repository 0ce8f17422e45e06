"""The private mean of a round, window by window: the noised sum of the changes, on their base.

What stands for floating tensors in an update is the client's clipped change; each counts 1, and
there may be none. Integers and bools are those of the base: what clients make of them, such as a
count of batches, is not published.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from stratagem.common.privacy.noise import rounded_to_grid
from stratagem.coordinator.core.facts import RoundAccounted
from stratagem.coordinator.updates.numpy_floats import Raw, Wide, widen
from stratagem.coordinator.updates.privacy.round_noise import TensorNoise
from stratagem.coordinator.updates.state_reader import StateReader
from stratagem.coordinator.updates.update_sources import Source

_WINDOW_ELEMENTS: Final = 1 << 18


class PrivateMean:
    """The combination of a fold that makes sums of changes the next state."""

    def __init__(self, noise: TensorNoise, of_round: RoundAccounted, base: StateReader) -> None:
        self._noise, self._base = noise, base
        self._sigma, self._num_expected = of_round.sum_noise, of_round.num_expected
        self.window_elements = _WINDOW_ELEMENTS

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        """Fill `out` with the next state from that byte on, and `raw` with the base."""
        out[:] = 0.0
        change = np.empty(out.size)
        for source in sources:
            source.read(offset, raw)
            widen(dtype, raw, change)
            out += change
        noise = self._noise.read(dtype, offset, out.size)
        out += self._sigma * noise
        out[:] = rounded_to_grid(out, self._sigma)
        out[np.isnan(noise)] = 0.0  # whatever clients send of what is frozen
        out /= self._num_expected
        raw[:] = self._base.read_raw(dtype, offset, raw.size)
        widen(dtype, raw, change)
        out += change

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        """Fill `out` with integers or bools of the base; updates need not agree on them."""
        for source in sources:
            source.read(offset, out)
        out[:] = self._base.read_raw(dtype, offset, out.size)
        return ""
