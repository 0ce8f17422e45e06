"""int8 and int4 in blocks: a scale for each block of neighbours, max|x| / 127 or max|x| / 7.

Rounded to the nearest, ties to even. The last block may have fewer elements. Two levels of int4 are
one byte, the first one in its low bits.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stratagem.common.compression.codec import ByteArray, Decode, FloatArray, Read, joined, to_bytes

LEVELS: Final = {8: 127, 4: 7}
"""The largest level by bits."""


class ScaledBlocks:
    """float32 scales of all blocks, then the levels: n bytes, or n / 2 of int4."""

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
            own = nibbles[start - 2 * from_byte :][: stop - start]
            return (own ^ 8).astype(np.int8) - np.int8(8)

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
