"""Ternary: -1, 0 or +1 times one scale per tensor, two bits per element.

Deterministic: sign(x) where |x| > t = threshold_fraction · mean|x|, and the scale that fits best,
which is the mean |x| of what is kept (Ternary Weight Networks, https://arxiv.org/abs/1605.04711).
Means are sums in float64 over the tree of `sums`, nothing for what is not kept, divided, and
rounded to float32 once; so a device that holds the gradient gives the same bits.
It is biased and wants error feedback (https://arxiv.org/abs/1901.09847).
Stochastic: sign(x) with probability |x| / max|x|, scale max|x|; unbiased (TernGrad,
https://arxiv.org/abs/1705.07878).
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stratagem.common.compression.codec import ByteArray, Decode, FloatArray, Read, joined, to_bytes
from stratagem.common.numerics.counter_random import places, uniform
from stratagem.common.numerics.tree_sums import tree_sum

Trits = NDArray[np.int8]

_CODES: Final = (np.arange(256, dtype=np.uint8)[:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
_QUADS: Final = (_CODES & 1).astype(np.int8) - (_CODES >> 1).astype(np.int8)
"""The four elements of each byte, (256, 4): looked up a whole byte at a time, with their scale."""


class Ternary:
    """float32 scale, then four elements per byte: ceil(n / 4) + 4 bytes."""

    def __init__(self, numel: int, *, threshold_fraction: float, stochastic: bool) -> None:
        self.payload_bytes = 4 + -(-numel // 4)
        self._threshold_fraction, self._stochastic = threshold_fraction, stochastic

    def encode(self, x: FloatArray, seed: int) -> ByteArray:
        if self._stochastic:
            trits, scale = quantise_stochastic(x, seed)
        else:
            trits, scale = quantise(x, self._threshold_fraction)
        return joined([to_bytes(np.array([scale], np.float32)), pack(trits)])

    def decoder(self, read: Read) -> Decode:
        quads = _QUADS.astype(np.float32) * read(0, 1, "<f4")

        def window(start: int, stop: int) -> FloatArray:
            first, skipped = divmod(start, 4)
            packed = read(4 + first, -(-stop // 4) - first, "u1")
            return unpack(packed, stop - 4 * first, quads)[skipped:]

        return window


def quantise(x: FloatArray, threshold_fraction: float) -> tuple[Trits, np.float32]:
    """(trits, scale). x: (n,) float32, not modified; all zeros give scale 0."""
    magnitude = np.abs(x)
    kept = magnitude > threshold_of(threshold_fraction, tree_sum(magnitude), x.size)
    trits = np.sign(x).astype(np.int8) * kept
    return trits, mean(
        tree_sum(np.where(kept, magnitude, np.float32(0.0))), int(np.count_nonzero(kept))
    )


def threshold_of(fraction: float, total: float, num: int) -> np.float32:
    """Above which a value is kept, of so many whose magnitudes add up to the total."""
    return np.float32(fraction) * mean(total, num)


def quantise_stochastic(x: FloatArray, seed: int) -> tuple[Trits, np.float32]:
    """(trits, scale) with E[trits · scale] = x."""
    magnitude = np.abs(x)
    scale = np.float32(np.max(magnitude, initial=0.0))
    kept = uniform(seed, places(x.size)) * scale < magnitude
    return np.sign(x).astype(np.int8) * kept, scale


def mean(total: float, num: int) -> np.float32:
    """Return the mean, rounded once; 0 of nothing."""
    return np.float32(total / max(1, num))


def pack(trits: Trits) -> ByteArray:
    """Element i at bits 2(i mod 4) of byte i // 4: 0 -> 00, +1 -> 01, -1 -> 10."""
    codes = np.zeros(-(-trits.size // 4) * 4, np.uint8)
    codes[: trits.size] = (trits > 0) | ((trits < 0).astype(np.uint8) << np.uint8(1))
    quads = codes.reshape(-1, 4)
    packed = quads[:, 0] | quads[:, 1] << np.uint8(2)
    packed |= quads[:, 2] << np.uint8(4) | quads[:, 3] << np.uint8(6)
    return packed


def unpack(packed: ByteArray, numel: int, quads: NDArray[Any] = _QUADS) -> NDArray[Any]:
    """The way back, or with the four elements of each byte given, (256, 4), to those. Raises
    ValueError at the code 11, which nothing packs."""
    _check(packed, numel)
    elements: NDArray[Any] = np.take(quads, packed, axis=0).reshape(-1)[:numel]
    return elements


def _check(packed: ByteArray, numel: int) -> None:
    """Raise ValueError for the code 11; bits after the last element in its byte are ignored."""
    whole, rest = divmod(numel, 4)
    both = packed & packed >> np.uint8(1) & np.uint8(0b0101_0101)
    last = both[whole : whole + 1] & np.uint8((1 << 2 * rest) - 1)
    if both[:whole].any() or last.any():
        raise ValueError("a ternary payload holds the code 11")
