"""The operators in plain torch: the reference, and the backend where Triton is not used.

torch has no uint32 arithmetic: words are int32, whose products have the same 32 bits, and the sign
bits of a shift are masked off. Products and sums are separate operations, so that none is
contracted to a fused one, which rounds differently. Arguments were checked by `kernels.ops`, which
also describes each operator.
"""

from typing import Final

import torch
from torch import Tensor

SIGN_SALT: Final = 0x9E3779B9
CHUNK: Final = 1 << 15
"""Number of elements hashed at once, so that intermediate results fit into the cache."""


def signs(seed: int, numel: int, device: torch.device) -> Tensor:
    return _signs(seed, torch.arange(numel, device=device))


def _signs(seed: int, indices: Tensor) -> Tensor:
    return (1 - 2 * (_words(seed, indices) & 1)).to(torch.float32)


def _words(seed: int, indices: Tensor) -> Tensor:
    """Return hash32 of the seed and each index, as int32 with the same bits."""
    return _lowbias32(_lowbias32(indices.to(torch.int32)).bitwise_xor_(signed(seed)))


def _lowbias32(x: Tensor) -> Tensor:
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)
    x.mul_(0x7FEB352D)
    x = (x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x)
    x.mul_(signed(0x846CA68B))
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)


def signed(word: int) -> int:
    """Return the same 32 bits as a signed number, which torch and triton store in 32 bits."""
    return word - (1 << 32) if word >> 31 else word


def _uniform(seed: int, indices: Tensor) -> Tensor:
    out = torch.empty(indices.numel(), dtype=torch.float32, device=indices.device)
    parts, chunks = torch.split(out, CHUNK), torch.split(indices, CHUNK)
    for part, chunk in zip(parts, chunks, strict=True):
        part.copy_((_words(seed, chunk) >> 8).bitwise_and_(0xFFFFFF))
    return out.mul_(2.0**-24)


def sum_magnitudes(x: Tensor, threshold: float) -> Tensor:
    magnitude = x.abs()
    is_above = (magnitude > threshold) | magnitude.isnan()
    total = tree_sum(torch.where(is_above, magnitude, 0.0).to(torch.float64))
    return torch.stack([total, is_above.sum(dtype=torch.float64)])


def dot(x: Tensor, y: Tensor) -> Tensor:
    return tree_sum(x.to(torch.float64) * y.to(torch.float64))


def tree_sum(x: Tensor) -> Tensor:
    """Return the sum over the binary tree of neighbours, 0 with 1, 2 with 3, ...; 0 for no
    elements: [n] -> ()."""
    while x.numel() > 1:
        if x.numel() % 2:
            x = torch.nn.functional.pad(x, (0, 1))
        x = x[0::2] + x[1::2]
    return x.sum() + 0.0  # never -0


def quantise_deterministic(
    x: Tensor, threshold: float, scale: float, rest: Tensor | None
) -> Tensor:
    return _quantise(x, x.abs() > threshold, scale, rest)


def quantise_stochastic(x: Tensor, scale: float, seed: int) -> Tensor:
    noise = _uniform(seed, torch.arange(x.numel(), device=x.device))
    return _quantise(x, noise * scale < x.abs(), scale, None)


def _quantise(x: Tensor, is_kept: Tensor, scale: float, rest: Tensor | None) -> Tensor:
    plus, minus = is_kept & (x > 0), is_kept & (x < 0)
    if rest is not None:
        sign = plus.to(torch.float32) - minus.to(torch.float32)
        torch.sub(x, sign * scale, out=rest)
    codes = plus.to(torch.uint8) | (minus.to(torch.uint8) << 1)
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % 4))
    return codes[0::4] | (codes[1::4] << 2) | (codes[2::4] << 4) | (codes[3::4] << 6)


def unpack(codes: Tensor, numel: int, scale: float) -> Tensor:
    pairs = torch.stack([(codes >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    pairs = pairs.reshape(-1)[:numel]
    sign = (pairs & 1).to(torch.float32) - (pairs >> 1).to(torch.float32)
    return sign * scale


def unpack_add(target: Tensor, codes: Tensor, scale: float) -> None:
    target.add_(unpack(codes, target.numel(), scale))


def sketch(x: Tensor, size: int, seed: int) -> Tensor:
    total = torch.zeros(size, dtype=torch.float32, device=x.device)
    for block in range(-(-x.numel() // size)):
        places, signs = _projection(block, size, seed, x.device)
        part = x[block * size : (block + 1) * size]
        part = torch.nn.functional.pad(part, (0, size - part.numel()))
        total += signs * part[places]
    return total


def unsketch(sketch: Tensor, numel: int, seed: int, scale: float) -> Tensor:
    size = sketch.numel()
    result = torch.empty(-(-numel // size) * size, dtype=torch.float32, device=sketch.device)
    for block in range(-(-numel // size)):
        places, signs = _projection(block, size, seed, sketch.device)
        result[block * size + places] = signs * sketch * scale
    return result[:numel].clone()


def _projection(block: int, size: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each position j of a block's sketch its source position and sign: int64 [size],
    float32 [size]."""
    words = _words(seed, torch.tensor([2 * block, 2 * block + 1])).to(torch.int64) & 0xFFFFFFFF
    factor, shift = words.tolist()
    j = torch.arange(size, device=device)
    return ((factor | 1) * j + shift) % size, _signs(seed ^ SIGN_SALT, block * size + j)
