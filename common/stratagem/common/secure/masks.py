"""Masks: the endless sequence of pseudo-random words of a key, any part of it at any time.

    words = AES-256-CTR(key, counter from 0), as little-endian uint32 or uint64

A key is used for one mask of one round and for nothing else, so the counter begins at zero. Memory
is one piece, whatever the size of the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.tensors.manifest import (
    Manifest,
    Purpose,
    TensorSpec,
    build_manifest,
    dtype_named,
)

# ---- quantisation ----
#
# Changes of a model as whole numbers, whose sum is exact in any order.
#
#     q = rint(clip(Δ, -c, c) · s) · weight,     s = (2^(bits-1) - 1) / c,     modulo 2^32 or 2^64
#
# The modulus is 2^32 where the sum of all clients fits, else 2^64: with n clients of weights up to
# W the sum lies within ±n·W·(2^(bits-1) - 1). Negative numbers are two's complements. Behind the
# elements comes one more, the weight itself. Pure functions over numpy arrays.

Words: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""uint32 or uint64: addition and subtraction are modulo 2^32 or 2^64."""
Floats: TypeAlias = NDArray[np.float64]

_NARROW: Final = 1 << 31
_WIDE: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The rule of a round. clip: the largest change of an element, either way. bits: of a
    quantised change, with its sign. num_clients: that may be in the sum. max_weight: of a
    client."""

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
        """The largest quantised change."""
        return (1 << (self.bits - 1)) - 1

    @property
    def largest_sum(self) -> int:
        return self.num_clients * self.max_weight * self.largest

    @property
    def scale(self) -> float:
        return self.largest / self.clip

    @property
    def word(self) -> np.dtype[Any]:
        """The type of the elements of an update."""
        return np.dtype("<u4" if self.largest_sum < _NARROW else "<u8")

    def quantise(self, changes: Floats, weight: int, out: Words) -> None:
        """Fill `out` with the quantised changes. changes: float64, finite; they are overwritten."""
        np.clip(changes, -self.clip, self.clip, out=changes)
        changes *= self.scale
        np.rint(changes, out=changes)
        whole = changes.astype(np.int64)
        whole *= weight
        out[:] = whole.view(np.uint64).astype(self.word)

    def mean(self, total: Words, sum_of_weights: int) -> Floats:
        """Return the mean change of an unmasked sum, in float64. Raises ValueError where the sum is
        beyond what so many clients can give: then it is none of honest clients, or still masked."""
        signed = total.view(f"<i{self.word.itemsize}")
        if signed.size:
            largest = max(int(signed.max()), -int(signed.min()))
            if largest > sum_of_weights * self.largest:
                raise ValueError("the sum is beyond the range of quantised changes")
        mean: Floats = signed.astype(np.float64)
        mean /= self.scale * sum_of_weights
        return mean


# ---- mask stream ----

_BLOCK_BYTES: Final = 16
_PIECE_BYTES: Final = 1 << 17
"""Bytes of a mask made at once: with the words that they are added to, they stay in the cache."""
_ZEROS: Final = bytes(_PIECE_BYTES)


def apply_mask(key: bytes, start: int, words: Words, *, subtract: bool = False) -> None:
    """Add the mask of a key, from its element `start` on, to the words; or subtract it.

    words: contiguous. key: 32 bytes.
    """
    item_bytes = words.dtype.itemsize
    block, skipped = divmod(start * item_bytes, _BLOCK_BYTES)
    cipher = Cipher(AES256(key), CTR(block.to_bytes(_BLOCK_BYTES, "big"))).encryptor()
    if skipped:
        cipher.update(_ZEROS[:skipped])
    num = _PIECE_BYTES // item_bytes
    buffer = bytearray(_PIECE_BYTES + _BLOCK_BYTES)
    for begin in range(0, words.size, num):
        piece = words[begin : begin + num]
        cipher.update_into(_ZEROS[: piece.nbytes], buffer)
        mask = np.frombuffer(buffer, words.dtype, piece.size)
        if subtract:
            piece -= mask
        else:
            piece += mask


# ---- masked layout ----
#
# Where the elements of a model stand in a masked update.
#
# A masked update is one tensor: the floating elements of the model in the order of its bytes, then
# the weight. Integers and bools are not in it, and tied tensors are once.

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
