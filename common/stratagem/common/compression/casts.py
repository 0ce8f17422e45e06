"""fp16 and bf16: narrower floats, rounded to nearest, ties to even.

fp16 has few exponents, so each tensor is scaled by a power of two, which is exact, until its
largest value is just below 2^15. bf16 has the exponents of float32.
"""

import numpy as np

from stratagem.common.compression.codec import ByteArray, Decode, FloatArray, Read, joined, to_bytes

_TOP_EXPONENT = 15
_LARGEST_BF16 = 0x7F7F


class Half:
    """int32 exponent, then n float16: 2n + 4 bytes."""

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
    """The upper half of each float32: 2n bytes."""

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
