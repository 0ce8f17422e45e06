"""The formulas of docs/kernels.md in numpy, element by element where that is the plainest."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]


def lowbias32(x: Words) -> Words:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def hash32(seed: int, indices: NDArray[np.int64]) -> Words:
    words = (indices & 0xFFFFFFFF).astype(np.uint32)
    return lowbias32(lowbias32(words) ^ np.uint32(seed))


def uniform(seed: int, indices: NDArray[np.int64]) -> Floats:
    return (hash32(seed, indices) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def ternary(x: Floats, threshold: float) -> Floats:
    return np.sign(x) * (np.abs(x) > np.float32(threshold)) + np.float32(0)  # no negative zero


def ternary_stochastic(x: Floats, scale: float, seed: int) -> Floats:
    noise = uniform(seed, np.arange(x.size)) * np.float32(scale)
    return np.sign(x) * (noise < np.abs(x)) + np.float32(0)


def pack(signs: Floats) -> NDArray[np.uint8]:
    packed = np.zeros(-(-signs.size // 4), np.uint8)
    for i, sign in enumerate(signs):
        packed[i // 4] |= {0: 0b00, 1: 0b01, -1: 0b10}[int(sign)] << 2 * (i % 4)
    return packed


def tree_sum(squares: list[float]) -> float:
    if len(squares) <= 1:
        return squares[0] if squares else 0.0
    pairs = zip(squares[0::2], [*squares[1::2], 0.0], strict=False)
    return tree_sum([left + right for left, right in pairs])


def _places(block: int, size: int, seed: int) -> tuple[NDArray[np.int64], Floats]:
    factor, shift = (int(h) for h in hash32(seed, np.array([2 * block, 2 * block + 1])))
    places = [((factor | 1) * j + shift) % size for j in range(size)]
    odd = hash32(seed ^ 0x9E3779B9, block * size + np.arange(size)) % np.uint32(2)
    return np.array(places), np.where(odd, -1, 1).astype(np.float32)


def sketch(x: Floats, size: int, seed: int) -> Floats:
    num_blocks = -(-x.size // size)
    padded = np.pad(x, (0, num_blocks * size - x.size))
    total = np.zeros(size, np.float32)
    for block in range(num_blocks):
        places, signs = _places(block, size, seed)
        total = total + signs * padded[block * size + places]
    return total


def unsketch(values: Floats, numel: int, seed: int, scale: float) -> Floats:
    size = values.size
    result = np.zeros(-(-numel // size) * size, np.float32)
    for block in range(-(-numel // size)):
        places, signs = _places(block, size, seed)
        result[block * size + places] = signs * values * np.float32(scale)
    return result[:numel]
