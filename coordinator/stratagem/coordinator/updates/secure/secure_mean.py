"""The mean change of a round whose updates are masked, window by window, on the base of the round.

    sum  = Σ y_k - Σ self masks of the survivors - Σ pair masks with those that dropped out
    next = w_global + sum / (s · Σ weights)                         in float64

modulo 2^32 or 2^64, so it is exact and in any order. The last element is the sum of the weights; it
also tells whether the masks are gone. Integers and bools are those of the base.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from stratagem.common.base.errors import StratagemError
from stratagem.common.secure.masks import MaskedLayout, Quantisation, Words, apply_mask
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.updates.numpy_floats import Raw, Wide, widen
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import StateReader
from stratagem.coordinator.updates.update_sources import CheckedData, Source

_WINDOW_ELEMENTS: Final = 1 << 18

MaskKeys = Sequence[tuple[bytes, bool]]
"""The key of each mask that is left in the sum, and whether it was subtracted there."""


class SumError(StratagemError):
    """The sum of the masked updates cannot be that of the clients."""


class SecureMean:
    """The combination of a fold that makes the sum of masked changes the next state."""

    def __init__(
        self,
        entries: Sequence[SpoolEntry],
        masks: MaskKeys,
        rule: Quantisation,
        model: Manifest,
        base: StateReader,
    ) -> None:
        """Raises SumError where the sum of the weights shows that masks are left in it."""
        self._updates = [CheckedData(entry) for entry in entries]
        self._masks, self._rule, self._base = masks, rule, base
        self._layout = MaskedLayout(model)
        self.window_elements = _WINDOW_ELEMENTS
        signed = self._sum(self._layout.num_elements, 1).view(f"<i{rule.word.itemsize}")
        self._sum_of_weights = int(signed[0])
        least, most = len(entries), len(entries) * rule.max_weight
        if not least <= self._sum_of_weights <= most:
            raise SumError(
                "the sum of the weights is none of these clients: masks are left in it, as a "
                "client has masked its update otherwise than it has said"
            )

    def floats(
        self, sources: Sequence[Source], dtype: str, offset: int, raw: Raw, out: Wide
    ) -> None:
        """Fill `out` with the next state from that byte on, and `raw` with the base."""
        total = self._sum(self._layout.place(offset), out.size)
        try:
            change = self._rule.mean(total, self._sum_of_weights)
        except ValueError as error:
            raise SumError(f"{error}: a client has sent what no client can") from None
        raw[:] = self._base.read_raw(dtype, offset, raw.size)
        widen(dtype, raw, out)
        out += change

    def integers(self, sources: Sequence[Source], dtype: str, offset: int, out: Raw) -> str:
        """Fill `out` with integers or bools of the base."""
        out[:] = self._base.read_raw(dtype, offset, out.size)
        return ""

    def _sum(self, place: int, num: int) -> Words:
        """Return the unmasked sum of elements from a place on."""
        word = self._rule.word
        total: Words = np.zeros(num, word)
        for update in self._updates:
            total += update.read(place * word.itemsize, num, word.str)
        for key, was_subtracted in self._masks:
            apply_mask(key, place, total, subtract=not was_subtracted)
        return total
