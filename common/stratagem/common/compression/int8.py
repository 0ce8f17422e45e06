"""int8: one scale per tensor, max|x| / 127, and values -127 to 127.

Rounded to the nearest, ties to even, or stochastically: floor(x / scale + u), which is unbiased
(QSGD, https://arxiv.org/abs/1610.02132).
"""

import numpy as np

from stratagem.common.compression.codec import ByteArray, Decode, FloatArray, Read, joined, to_bytes
from stratagem.common.numerics.counter_random import places, uniform

_LEVELS = np.float32(127.0)


class Int8:
    """float32 scale, then n int8: n + 4 bytes."""

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
