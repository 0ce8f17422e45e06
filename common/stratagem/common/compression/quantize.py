"""Codecs that narrow each element: int8 and int4 in blocks, fp16 and bf16, int8 and ternary per
tensor.

Values are rounded to the nearest, ties to even, unless a codec says otherwise.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stratagem.common.compression.codec import ByteArray, Decode, FloatArray, Read, joined, to_bytes
from stratagem.common.numerics.keys import places, uniform
from stratagem.common.numerics.shards import pairwise_sum

# ---- Blocks of int8 and int4 ----
#
# Each block of neighbours has a scale, max|x| / 127 or max|x| / 7. The last block may have fewer
# elements. Two levels of int4 are one byte, the first one in its low bits.

LEVELS: Final = {8: 127, 4: 7}
"""The largest quantized integer, keyed by the number of bits per element."""


class ScaledBlocks:
    """int8 or int4 codec with a float32 scale per block: n bytes, or n / 2, plus the scales."""

    def __init__(self, numel: int, *, bits: int, block: int) -> None:
        self._numel, self._bits, self._block = numel, bits, block
        self._num_blocks = -(-numel // block)
        self.payload_bytes = 4 * self._num_blocks + -(-numel * bits // 8)

    def encode(self, x: FloatArray, seed: int) -> ByteArray:
        del seed
        top = np.float32(LEVELS[self._bits])
        padded = np.zeros(self._num_blocks * self._block, np.float32)
        padded[: self._numel] = x
        rows = padded.reshape(self._num_blocks, self._block)
        scales = np.max(np.abs(rows), axis=1, initial=np.float32(0.0)) / top
        ratios = np.zeros_like(rows)  # a maximum of a few of the smallest floats has no scale
        np.divide(rows, scales[:, None], out=ratios, where=scales[:, None] > 0)
        levels = np.clip(np.rint(ratios), -top, top).astype(np.int8).reshape(-1)[: self._numel]
        return joined([to_bytes(scales), to_bytes(self._packed(levels))])

    def _packed(self, levels: NDArray[np.int8]) -> NDArray[np.generic]:
        if self._bits == 8:
            return levels
        nibbles = np.zeros(-(-self._numel // 2) * 2, np.uint8)
        nibbles[: self._numel] = levels.view(np.uint8) & 15
        return nibbles[0::2] | nibbles[1::2] << 4

    def decoder(self, read: Read) -> Decode:
        first = 4 * self._num_blocks

        def levels_of(start: int, stop: int) -> NDArray[Any]:
            if self._bits == 8:
                return read(first + start, stop - start, "i1")
            from_byte, to_byte = start // 2, -(-stop // 2)
            packed = read(first + from_byte, to_byte - from_byte, "u1")
            nibbles = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)
            levels = nibbles[start - 2 * from_byte :][: stop - start]
            return (levels ^ 8).astype(np.int8) - np.int8(8)

        def window(start: int, stop: int) -> FloatArray:
            if start == stop:
                return np.zeros(0, np.float32)
            from_block, to_block = start // self._block, -(-stop // self._block)
            scales = read(4 * from_block, to_block - from_block, "<f4").astype(np.float32)
            which = np.arange(start, stop) // self._block - from_block
            values: FloatArray = levels_of(start, stop).astype(np.float32)
            values *= scales[which]
            return values

        return window


# ---- fp16 and bf16 ----
#
# fp16 has few exponents, so each tensor is scaled by a power of two, which is exact, until its
# largest value is just below 2^15. bf16 has the exponents of float32.

_TOP_EXPONENT = 15
_LARGEST_BF16 = 0x7F7F


class Half:
    """float16 codec with one exponent shift per tensor: an int32, then n float16, 2n + 4 bytes."""

    def __init__(self, numel: int) -> None:
        self.payload_bytes = 2 * numel + 4

    def encode(self, x: FloatArray, seed: int) -> ByteArray:
        del seed
        _, exponent = np.frexp(np.max(np.abs(x), initial=0.0))
        shift = int(exponent) - _TOP_EXPONENT
        halves = np.ldexp(x, -shift).astype(np.float16)
        return joined([to_bytes(np.array([shift], np.int32)), to_bytes(halves)])

    def decoder(self, read: Read) -> Decode:
        shift = int(read(0, 1, "<i4")[0])

        def window(start: int, stop: int) -> FloatArray:
            halves = read(4 + 2 * start, stop - start, "<f2")
            return np.ldexp(halves.astype(np.float32), shift)

        return window


class BrainFloat:
    """bfloat16 codec: the upper half of each float32, 2n bytes."""

    def __init__(self, numel: int) -> None:
        self.payload_bytes = 2 * numel

    def encode(self, x: FloatArray, seed: int) -> ByteArray:
        del seed
        bits = x.view(np.uint32)
        magnitude = bits & np.uint32(0x7FFFFFFF)
        odd = (magnitude >> np.uint32(16)) & np.uint32(1)
        rounded = (magnitude + np.uint32(0x7FFF) + odd) >> np.uint32(16)
        # A value above the largest finite value stays finite.
        rounded = np.minimum(rounded, np.uint32(_LARGEST_BF16))
        sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
        return to_bytes((rounded | sign).astype(np.uint16))

    def decoder(self, read: Read) -> Decode:
        def window(start: int, stop: int) -> FloatArray:
            words = read(2 * start, stop - start, "<u2").astype(np.uint32)
            return (words << np.uint32(16)).view(np.float32)

        return window


# ---- int8 ----
#
# There is one scale per tensor, max|x| / 127, with values from -127 to 127. Rounding is to the
# nearest, ties to even, or stochastic: floor(x / scale + u), which is unbiased (QSGD,
# https://arxiv.org/abs/1610.02132).

_LEVELS = np.float32(127.0)


class Int8:
    """int8 codec with one float32 scale per tensor: n + 4 bytes."""

    def __init__(self, numel: int, *, stochastic: bool) -> None:
        self.payload_bytes = numel + 4
        self._stochastic = stochastic

    def encode(self, x: FloatArray, seed: int) -> ByteArray:
        scale = np.max(np.abs(x), initial=np.float32(0.0)) / _LEVELS
        levels = np.zeros_like(x)
        if scale > 0:  # a maximum below 127 of the smallest float has no scale
            ratios = x / scale
            if self._stochastic:
                levels = np.floor(ratios + uniform(seed, places(x.size)))
            else:
                levels = np.rint(ratios)
        quantised = np.clip(levels, -_LEVELS, _LEVELS).astype(np.int8)
        return joined([to_bytes(np.array([scale], np.float32)), to_bytes(quantised)])

    def decoder(self, read: Read) -> Decode:
        scale = read(0, 1, "<f4")

        def window(start: int, stop: int) -> FloatArray:
            values: FloatArray = read(4 + start, stop - start, "i1").astype(np.float32)
            values *= scale
            return values

        return window


# ---- Ternary ----
#
# A ternary value is -1, 0 or +1 times one scale per tensor, two bits per element.
#
# The deterministic form takes sign(x) where |x| > t = threshold_fraction · mean|x|, and the scale
# that fits best, which is the mean |x| of the elements above the threshold (Ternary Weight
# Networks, https://arxiv.org/abs/1605.04711). Means are sums in float64 over the tree of
# `pairwise_sum`, in which other elements count nothing, divided, and rounded to float32 once; so
# a device that holds the gradient gives the same bits. This form is biased and needs error
# feedback (https://arxiv.org/abs/1901.09847).
#
# The stochastic form takes sign(x) with probability |x| / max|x|, and the scale max|x|; it is
# unbiased (TernGrad, https://arxiv.org/abs/1705.07878).

Trits = NDArray[np.int8]

_CODES: Final = (np.arange(256, dtype=np.uint8)[:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
_QUADS: Final = (_CODES & 1).astype(np.int8) - (_CODES >> 1).astype(np.int8)
"""The lookup table (256, 4) of the four ternary elements that each value of a byte stands for."""


class Ternary:
    """Ternary codec: a float32 scale, then four elements per byte, ceil(n / 4) + 4 bytes."""

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
    """Quantize x, (n,) float32, to (trits: -1, 0 or +1, scale); all zeros give scale 0."""
    magnitude = np.abs(x)
    mask = magnitude > threshold_of(threshold_fraction, pairwise_sum(magnitude), x.size)
    trits = np.sign(x).astype(np.int8) * mask
    return trits, mean(
        pairwise_sum(np.where(mask, magnitude, np.float32(0.0))), int(np.count_nonzero(mask))
    )


def threshold_of(fraction: float, total: float, num: int) -> np.float32:
    """Return the magnitude above which an element becomes ±1 rather than 0: `fraction` times the
    mean magnitude, from the sum `total` of `num` magnitudes."""
    return np.float32(fraction) * mean(total, num)


def quantise_stochastic(x: FloatArray, seed: int) -> tuple[Trits, np.float32]:
    """Quantize x to random trits and a scale that are unbiased: E[trits · scale] = x."""
    magnitude = np.abs(x)
    scale = np.float32(np.max(magnitude, initial=0.0))
    mask = uniform(seed, places(x.size)) * scale < magnitude
    return np.sign(x).astype(np.int8) * mask, scale


def mean(total: float, num: int) -> np.float32:
    """Return total / num as float32, rounded once; 0 for num = 0."""
    return np.float32(total / max(1, num))


def pack(trits: Trits) -> ByteArray:
    """Pack element i at bits 2(i mod 4) of byte i // 4: 0 -> 00, +1 -> 01, -1 -> 10."""
    codes = np.zeros(-(-trits.size // 4) * 4, np.uint8)
    codes[: trits.size] = (trits > 0) | ((trits < 0).astype(np.uint8) << np.uint8(1))
    quads = codes.reshape(-1, 4)
    packed = quads[:, 0] | quads[:, 1] << np.uint8(2)
    packed |= quads[:, 2] << np.uint8(4) | quads[:, 3] << np.uint8(6)
    return packed


def unpack(packed: ByteArray, numel: int, quads: NDArray[Any] = _QUADS) -> NDArray[Any]:
    """Unpack the trits of `pack`. quads: (256, 4), the four elements that each byte stands for.
    Raises ValueError at the code 11, which `pack` never makes."""
    _check(packed, numel)
    elements: NDArray[Any] = np.take(quads, packed, axis=0).reshape(-1)[:numel]
    return elements


def _check(packed: ByteArray, numel: int) -> None:
    """Raise ValueError if a byte of packed trits has the code 11, except in padding bits."""
    whole, rest = divmod(numel, 4)
    both = packed & packed >> np.uint8(1) & np.uint8(0b0101_0101)
    last = both[whole : whole + 1] & np.uint8((1 << 2 * rest) - 1)
    if both[:whole].any() or last.any():
        raise ValueError("a ternary payload holds the code 11")
