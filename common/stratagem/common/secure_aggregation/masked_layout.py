"""Where the elements of a model stand in a masked update.

A masked update is one tensor: the floating elements of the model in the order of its bytes, then
the weight. Integers and bools are not in it, and tied tensors are once.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import numpy as np

from stratagem.common.secure_aggregation.quantisation import Quantisation
from stratagem.common.tensors.dtypes import dtype_named
from stratagem.common.tensors.manifest import Manifest, Purpose, TensorSpec, build_manifest

MASKED: Final = "masked"
"""Name of the only tensor of a masked update. Its type is that of the words with a sign: the tensor
stream has no unsigned ones, and the bits are the same."""


class MaskedLayout:
    """The places of a model's elements in its masked updates."""

    def __init__(self, model: Manifest) -> None:
        specs = [spec for spec in model.stored() if dtype_named(spec.dtype).is_floating]
        sizes = [spec.size_bytes // dtype_named(spec.dtype).item_bytes for spec in specs]
        self._specs, self.num_elements = specs, sum(sizes)
        self._firsts = list(accumulate(sizes, initial=0))[:-1]
        self._offsets = np.array([spec.offset for spec in specs], np.int64)

    def tensors(self) -> Iterator[tuple[TensorSpec, int]]:
        """Yield each floating tensor with the place of its first element."""
        yield from zip(self._specs, self._firsts, strict=True)

    def place(self, offset: int) -> int:
        """Return the place of the floating element at a byte of the model's data."""
        index = int(np.searchsorted(self._offsets, offset, side="right")) - 1
        spec = self._specs[index]
        return self._firsts[index] + (offset - spec.offset) // dtype_named(spec.dtype).item_bytes

    def manifest(self, rule: Quantisation) -> Manifest:
        """Return the manifest of a masked update: the elements, and the weight behind them."""
        dtype = f"int{8 * rule.word.itemsize}"
        return build_manifest([(MASKED, dtype, (self.num_elements + 1,))], Purpose.UPDATE)
