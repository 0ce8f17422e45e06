"""top_k: the k largest values by magnitude and where they stand; the rest is dropped.

Biased, so it wants error feedback (https://arxiv.org/abs/1809.07599). Of equal magnitudes the
earlier element is kept. Places are a bitmap where that is smaller than a number for each.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from stratagem.common.compression.codec import ByteArray, FloatArray, from_bytes, joined, to_bytes


class TopK:
    """k float32 values, then min(4k, ceil(n / 8)) bytes of places."""

    def __init__(self, numel: int, *, k_fraction: float) -> None:
        self._numel = numel
        self._k = min(numel, max(1, math.ceil(k_fraction * numel)))
        self._is_bitmap = -(-numel // 8) < 4 * self._k
        self.payload_bytes = 4 * self._k + (-(-numel // 8) if self._is_bitmap else 4 * self._k)

    def encode(self, x: FloatArray, seed: int) -> ByteArray:
        del seed
        kept = largest(x, self._k)
        if self._is_bitmap:
            bits = np.zeros(self._numel, np.uint8)
            bits[kept] = 1
            where = np.packbits(bits, bitorder="little")
        else:
            where = to_bytes(kept.astype(np.uint32))
        return joined([to_bytes(x[kept]), where])

    def decode(self, payload: ByteArray) -> FloatArray:
        values, where = payload[: 4 * self._k], payload[4 * self._k :]
        if self._is_bitmap:
            kept = np.flatnonzero(np.unpackbits(where, count=self._numel, bitorder="little"))
        else:
            kept = from_bytes(where, "<u4").astype(np.int64)
        if kept.size != self._k or (kept >= self._numel).any():
            raise ValueError(f"a top_k payload does not name {self._k} of {self._numel} places")
        x = np.zeros(self._numel, np.float32)
        x[kept] = from_bytes(values, "<f4")
        return x


def largest(x: FloatArray, k: int) -> NDArray[np.int64]:
    """Places of the k largest |x|, ascending."""
    if k == 0:
        return np.empty(0, np.int64)
    magnitude = np.abs(x)
    smallest_kept = np.partition(magnitude, x.size - k)[x.size - k]
    kept = magnitude > smallest_kept
    ties = np.flatnonzero(magnitude == smallest_kept)
    kept[ties[: k - int(kept.sum())]] = True
    return np.flatnonzero(kept)
