"""Quantize changes of a model to whole numbers, whose sum is exact in any order.

q = rint(clip(Δ, -c, c) · s) · weight, s = (2^(bits-1) - 1) / c, modulo 2^32 or 2^64

The modulus is 2^32 where the sum of all clients fits, else 2^64: with n clients of weights up to W
the sum lies within ±n·W·(2^(bits-1) - 1). Negative numbers are two's complements. The weight itself
follows the elements. The functions are pure, over numpy arrays.
"""

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stratagem.common.base.errors import InvalidInputError

Words: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Arrays of uint32 or uint64: addition and subtraction are modulo 2^32 or 2^64."""
Floats: TypeAlias = NDArray[np.float64]

_NARROW: Final = 1 << 31
_WIDE: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The rule by which a round's changes become integers. clip: the largest change of an element,
    in either direction. bits: the size of a quantised change, with its sign. num_clients: the most
    clients in a sum. max_weight: the largest weight of a client."""

    clip: float
    bits: int
    num_clients: int
    max_weight: int = 1

    def __post_init__(self) -> None:
        if self.largest_sum >= _WIDE:
            text = f"{self.num_clients} clients of weight {self.max_weight} with {self.bits} bits"
            raise InvalidInputError(f"the sum of {text} does not fit into 64 bits")

    @property
    def largest(self) -> int:
        """Return the largest integer that a quantized change can have."""
        return (1 << (self.bits - 1)) - 1

    @property
    def largest_sum(self) -> int:
        return self.num_clients * self.max_weight * self.largest

    @property
    def scale(self) -> float:
        return self.largest / self.clip

    @property
    def word(self) -> np.dtype[Any]:
        """Return the integer type, uint32 or uint64, in which the sum of all clients fits."""
        return np.dtype("<u4" if self.largest_sum < _NARROW else "<u8")

    def quantise(self, changes: Floats, weight: int, out: Words) -> None:
        """Quantize the changes into `out`. changes: float64, finite; they are overwritten."""
        np.clip(changes, -self.clip, self.clip, out=changes)
        changes *= self.scale
        np.rint(changes, out=changes)
        whole = changes.astype(np.int64)
        whole *= weight
        out[:] = whole.view(np.uint64).astype(self.word)

    def mean(self, total: Words, sum_of_weights: int) -> Floats:
        """Return the mean change, float64, from the unmasked sum of all clients. Raises ValueError
        if the sum is impossible: some clients are dishonest, or it is still masked."""
        signed = total.view(f"<i{self.word.itemsize}")
        if signed.size:
            largest = max(int(signed.max()), -int(signed.min()))
            if largest > sum_of_weights * self.largest:
                raise ValueError("the sum is beyond the range of quantised changes")
        mean: Floats = signed.astype(np.float64)
        mean /= self.scale * sum_of_weights
        return mean
