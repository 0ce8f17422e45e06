"""top_k: the k largest values by magnitude and their indices; all other values are dropped.

The codec is biased, so it needs error feedback (https://arxiv.org/abs/1809.07599). Of equal
magnitudes the earlier element is kept. The indices ascend; they are encoded as a bitmap where that
is smaller than a list of numbers.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stratagem.common.compression.codec import ByteArray, Decode, FloatArray, Read, joined, to_bytes

_PLACES_READ: Final = 1 << 14
"""The number of kept indices that are read from a payload at once."""


class TopK:
    """Top-k codec: k float32 values, then their indices in min(4k, ceil(n / 8)) bytes."""

    def __init__(self, numel: int, *, k_fraction: float) -> None:
        self._numel = numel
        self._k = min(numel, max(1, math.ceil(k_fraction * numel)))
        self._is_bitmap = -(-numel // 8) < 4 * self._k
        self.payload_bytes = 4 * self._k + (-(-numel // 8) if self._is_bitmap else 4 * self._k)

    def encode(self, x: FloatArray, seed: int) -> ByteArray:
        del seed
        indices = largest(x, self._k)
        if self._is_bitmap:
            bits = np.zeros(self._numel, np.uint8)
            bits[indices] = 1
            where = np.packbits(bits, bitorder="little")
        else:
            where = to_bytes(indices.astype(np.uint32))
        return joined([to_bytes(x[indices]), where])

    def decoder(self, read: Read) -> Decode:
        num_found = 0

        def window(start: int, stop: int) -> FloatArray:
            nonlocal num_found
            indices = self._places(read, start, stop, num_found)
            first, num_found = num_found, num_found + indices.size
            if num_found > self._k or (stop == self._numel and num_found < self._k):
                raise ValueError(f"a top_k payload does not name {self._k} of {self._numel} places")
            x = np.zeros(stop - start, np.float32)
            x[indices - start] = read(4 * first, indices.size, "<f4")
            return x

        return window

    def _places(self, read: Read, start: int, stop: int, num_before: int) -> NDArray[np.int64]:
        """Return the kept indices from start to stop; num_before: the number of those before."""
        if self._is_bitmap:
            first, skipped = divmod(start, 8)
            bits = read(4 * self._k + first, -(-stop // 8) - first, "u1")
            inside = np.unpackbits(bits, count=stop - 8 * first, bitorder="little")[skipped:]
            return np.flatnonzero(inside) + start
        chunks = [np.empty(0, np.int64)]
        while num_before < self._k and (not chunks[-1].size or chunks[-1][-1] < stop):
            num = min(_PLACES_READ, self._k - num_before)
            places = read(4 * (self._k + num_before), num, "<u4")
            chunks.append(places.astype(np.int64))
            num_before += num
        indices = np.concatenate(chunks)
        if (np.diff(indices, prepend=start - 1) <= 0).any():
            raise ValueError("a top_k payload names places that do not ascend")
        return indices[: np.searchsorted(indices, stop)]


def largest(x: FloatArray, k: int) -> NDArray[np.int64]:
    """Return the indices of the k largest |x|, ascending."""
    if k == 0:
        return np.empty(0, np.int64)
    magnitude = np.abs(x)
    smallest_kept = np.partition(magnitude, x.size - k)[x.size - k]
    mask = magnitude > smallest_kept
    ties = np.flatnonzero(magnitude == smallest_kept)
    mask[ties[: k - int(mask.sum())]] = True
    return np.flatnonzero(mask)
