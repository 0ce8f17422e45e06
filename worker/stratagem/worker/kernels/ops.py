"""The operators: arguments are checked here, and here it is decided who computes.

CUDA tensors go to the Triton programs (`fused`) where triton can be imported, all others to the
torch reference (`reference`). Neither checks anything. Both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from importlib import import_module, util
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from stratagem.worker.kernels import reference

MAX_SKETCH_SIZE: Final = 1 << 30
"""Places are counted in signed 32 bit numbers."""
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


class Backend(Protocol):
    """What `fused` and `reference` are. Vectors are flat and contiguous, scalars float32 values."""

    def hash32(self, seed: int, indices: Tensor) -> Tensor: ...
    def uniform(self, seed: int, indices: Tensor) -> Tensor: ...
    def quantise_deterministic(
        self, x: Tensor, threshold: float, residual: Tensor | None, scale: float
    ) -> Tensor: ...
    def quantise_stochastic(
        self, x: Tensor, scale: float, seed: int, residual: Tensor | None
    ) -> Tensor: ...
    def unpack(self, codes: Tensor, numel: int, scale: float) -> Tensor: ...
    def unpack_add(self, target: Tensor, codes: Tensor, scale: float) -> None: ...
    def accumulate(self, target: Tensor, source: Tensor, weight: float) -> Tensor: ...
    def sketch(self, x: Tensor, size: int, seed: int) -> Tensor: ...
    def unsketch(self, sketch: Tensor, numel: int, seed: int, scale: float) -> Tensor: ...


@cache
def _has_triton() -> bool:
    return util.find_spec("triton") is not None


def backend(tensor: Tensor) -> Backend:
    """Who computes on tensors like this one. Triton is imported when it is first needed."""
    if tensor.is_cuda and _has_triton():
        fused: Backend = import_module("stratagem.worker.kernels.fused")
        return fused
    return reference


def hash32(seed: int, indices: Tensor) -> Tensor:
    """lowbias32(lowbias32(i) ^ seed) of each index, modulo 2^32: int64 [n] -> int64 [n].

    lowbias32 is Chris Wellons' integer hash (https://nullprogram.com/blog/2018/07/31/).
    """
    _check_vector("indices", indices, (torch.int64,))
    return backend(indices).hash32(_seed(seed), indices)


def uniform(seed: int, indices: Tensor) -> Tensor:
    """The top 24 bits of hash32 as float32 in [0, 1): int64 [n] -> float32 [n]."""
    _check_vector("indices", indices, (torch.int64,))
    return backend(indices).uniform(_seed(seed), indices)


def quantise_deterministic(
    x: Tensor, threshold: float, *, residual: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Signs of the elements of x above the threshold: float32 [n] -> uint8 [ceil(n / 4)].

    q_i = sign(x_i) if |x_i| > threshold else 0, two bits each: 00 for 0, 01 for +1, 10 for -1;
    element i lies at bits 2 (i mod 4) of byte i // 4, unused bits are zero. With a residual
    (float32 [n], changed in place) x + residual is quantised, and the residual becomes
    (x + residual) - q * scale, as in 1-bit SGD's error feedback (Seide et al., 2014).
    """
    _check_vector("x", x, (torch.float32,))
    _check_like("residual", residual, x)
    threshold, scale = _at_least_zero("threshold", threshold), _at_least_zero("scale", scale)
    return backend(x).quantise_deterministic(x, threshold, residual, scale)


def quantise_stochastic(
    x: Tensor, scale: float, seed: int, *, residual: Tensor | None = None
) -> Tensor:
    """Like quantise_deterministic with q_i = sign(x_i) if uniform(seed, i) * scale < |x_i| else 0.

    Where scale is at least max |x|, q * scale has the mean x (TernGrad, Wen et al., 2017).
    """
    _check_vector("x", x, (torch.float32,))
    _check_like("residual", residual, x)
    scale = _at_least_zero("scale", scale)
    return backend(x).quantise_stochastic(x, scale, _seed(seed), residual)


def unpack(codes: Tensor, numel: int, scale: float = 1.0) -> Tensor:
    """q * scale: uint8 [ceil(numel / 4)] -> float32 [numel]. The unused code 11 counts as 0."""
    _check_codes(codes, numel)
    return backend(codes).unpack(codes, numel, _finite("scale", scale))


def unpack_add(target: Tensor, codes: Tensor, scale: float) -> None:
    """target += q * scale in place: float32 [n], uint8 [ceil(n / 4)]."""
    _check_vector("target", target, (torch.float32,))
    _check_codes(codes, target.numel())
    _check_device("codes", codes, target)
    backend(target).unpack_add(target, codes, _finite("scale", scale))


def accumulate(target: Tensor, source: Tensor, weight: float = 1.0) -> tuple[Tensor, Tensor]:
    """target += source * weight in place; (sum of squares of the new target, whether finite).

    target is float32 [n], source float32, bfloat16 or float16 [n]; the product is rounded to
    float32 before it is added. The answers are () float64 and () bool on the device of target.
    Squares are added in float64 over the binary tree of neighbours, 0 with 1, 2 with 3, ..., so
    the sum has the same bits on every device. It is finite exactly when all elements are: no sum
    of fewer than 2^768 squares of float32 numbers overflows float64.
    """
    _check_vector("target", target, (torch.float32,))
    _check_vector("source", source, _FLOATS)
    if source.numel() != target.numel():
        raise ValueError(
            f"source: {source.numel()} elements, but target has {target.numel()}; "
            "they must be the same"
        )
    _check_device("source", source, target)
    total = backend(target).accumulate(target, source, _finite("weight", weight))
    return total, torch.isfinite(total)


def sketch(x: Tensor, size: int, seed: int) -> Tensor:
    """A signed hashed projection: float32 [n] -> float32 [size], size a power of two.

    Block b of x, of `size` elements (zeros beyond n), is permuted and given signs by hashes of
    (seed, b, place), and the blocks are added in order: a count sketch (Charikar et al., 2002)
    in which no two elements of a block collide.
    """
    _check_vector("x", x, (torch.float32,))
    _check_size(size)
    return backend(x).sketch(x, size, _seed(seed))


def unsketch(sketch: Tensor, numel: int, seed: int, scale: float = 1.0) -> Tensor:
    """The transpose of `sketch`, times scale: float32 [size] -> float32 [numel]."""
    _check_vector("sketch", sketch, (torch.float32,))
    _check_size(sketch.numel())
    _check_numel(numel)
    return backend(sketch).unsketch(sketch, numel, _seed(seed), _finite("scale", scale))


# ---- arguments ----


def _check_vector(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name}: {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}; must be a contiguous vector of {allowed}"
        )


def _check_device(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name}: on {tensor.device}; must be on {other.device}")


def _check_like(name: str, tensor: Tensor | None, x: Tensor) -> None:
    if tensor is None:
        return
    _check_vector(name, tensor, (x.dtype,))
    _check_device(name, tensor, x)
    if tensor.numel() != x.numel():
        raise ValueError(f"{name}: {tensor.numel()} elements; must be {x.numel()}")


def _check_numel(numel: int) -> None:
    if numel < 0:
        raise ValueError(f"numel: {numel}; must be at least 0")


def _check_codes(codes: Tensor, numel: int) -> None:
    _check_vector("codes", codes, (torch.uint8,))
    _check_numel(numel)
    if codes.numel() != -(-numel // 4):
        raise ValueError(
            f"codes: {codes.numel()} bytes; must be {-(-numel // 4)} for {numel} elements"
        )


def _check_size(size: int) -> None:
    if not 1 <= size <= MAX_SKETCH_SIZE or size & (size - 1):
        raise ValueError(f"size: {size}; must be a power of two from 1 to {MAX_SKETCH_SIZE}")


def _seed(seed: int) -> int:
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"seed: {seed}; must be from 0 to {2**32 - 1}")
    return seed


def _finite(name: str, value: float) -> float:
    """The value as float32, in which all of this is computed."""
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    if not math.isfinite(rounded):
        raise ValueError(f"{name}: {value}; must be a finite float32")
    return rounded


def _at_least_zero(name: str, value: float) -> float:
    rounded = _finite(name, value)
    if rounded < 0:
        raise ValueError(f"{name}: {value}; must be at least 0")
    return rounded
