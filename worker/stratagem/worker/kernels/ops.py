"""The operators of the kernels, which check their arguments and choose the backend.

`runs_programs` decides which tensors go to the Triton programs (`kernels.triton`); all others go to
the torch reference (`kernels.torch`). The backends check nothing, and give the same bits.
"""

import math
import os
from functools import cache
from importlib import import_module, util
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from stratagem.worker.kernels import torch as torch_kernels

MAX_SKETCH_SIZE: Final = 1 << 30
"""Maximum size of a sketch, since positions are signed 32-bit numbers."""


class Backend(Protocol):
    """The interface of `kernels.triton` and `kernels.torch`. Vectors are flat and contiguous,
    scalars float32 values."""

    def signs(self, seed: int, numel: int, device: torch.device) -> Tensor: ...
    def sum_magnitudes(self, x: Tensor, threshold: float) -> Tensor: ...
    def dot(self, x: Tensor, y: Tensor) -> Tensor: ...
    def quantise_deterministic(
        self, x: Tensor, threshold: float, scale: float, rest: Tensor | None
    ) -> Tensor: ...
    def quantise_stochastic(self, x: Tensor, scale: float, seed: int) -> Tensor: ...
    def unpack(self, codes: Tensor, numel: int, scale: float) -> Tensor: ...
    def unpack_add(self, target: Tensor, codes: Tensor, scale: float) -> None: ...
    def sketch(self, x: Tensor, size: int, seed: int) -> Tensor: ...
    def unsketch(self, sketch: Tensor, numel: int, seed: int, scale: float) -> Tensor: ...


@cache
def _has_triton() -> bool:
    return util.find_spec("triton") is not None


def runs_programs(device: torch.device) -> bool:
    """Return whether tensors on this device are processed by Triton programs.

    That is so on CUDA devices if triton can be imported, and on the CPU under triton's interpreter
    (TRITON_INTERPRET=1).
    """
    is_interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return (device.type == "cuda" or is_interpreted) and _has_triton()


def backend(device: torch.device) -> Backend:
    """Return the backend for tensors of this device. Triton is imported at its first use."""
    if runs_programs(device):
        fused: Backend = import_module("stratagem.worker.kernels.triton")
        return fused
    return torch_kernels


def signs(seed: int, numel: int, device: torch.device) -> Tensor:
    """Return for each i from 0 the sign +1 if hash32(seed, i) is even, else -1: float32 [numel].

    hash32(seed, i) = lowbias32(lowbias32(i) ^ seed), by Chris Wellons' integer hash
    (https://nullprogram.com/blog/2018/07/31/).
    """
    _check_numel(numel)
    return backend(device).signs(_seed(seed), numel, device)


def sum_magnitudes(x: Tensor, *, threshold: float = -1.0) -> Tensor:
    """Return (sum of those |x_i| that are above the threshold, their number): float32 [n] ->
    float64 [2].

    A NaN counts as above it, so with a threshold below 0 the sum is finite exactly when all
    elements are. The sum is taken in float64 over the binary tree of neighbours, 0 with 1, 2 with
    3, ..., so it has the same bits on every device.
    """
    _check_vector("x", x)
    return backend(x.device).sum_magnitudes(x, _finite("threshold", threshold))


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of x_i · y_i in float64, over the same tree as `sum_magnitudes`: float32 [n],
    [n] -> () float64."""
    _check_vector("x", x)
    _check_like("y", y, x)
    return backend(x.device).dot(x, y)


def quantise_deterministic(
    x: Tensor, threshold: float, *, scale: float = 1.0, rest: Tensor | None = None
) -> Tensor:
    """Return the signs of the elements of x above the threshold: float32 [n] -> uint8 [ceil(n /
    4)].

    q_i = sign(x_i) if |x_i| > threshold else 0, two bits each: 00 for 0, 01 for +1, 10 for -1;
    element i is in bits 2 (i mod 4) of byte i // 4, unused bits are zero. rest (float32 [n], may be
    x) becomes x - q * scale, the residual of error feedback (Seide et al., 2014).
    """
    _check_vector("x", x)
    _check_like("rest", rest, x)
    threshold, scale = _at_least_zero("threshold", threshold), _at_least_zero("scale", scale)
    return backend(x.device).quantise_deterministic(x, threshold, scale, rest)


def quantise_stochastic(x: Tensor, scale: float, seed: int) -> Tensor:
    """Return codes as quantise_deterministic does, with q_i = sign(x_i) if uniform(seed, i) * scale
    < |x_i| else 0.

    uniform(seed, i) is the top 24 bits of hash32(seed, i), in [0, 1). Where scale is at least max
    |x|, q * scale has the mean x (TernGrad, Wen et al., 2017).
    """
    _check_vector("x", x)
    scale = _at_least_zero("scale", scale)
    return backend(x.device).quantise_stochastic(x, scale, _seed(seed))


def unpack(codes: Tensor, numel: int, scale: float = 1.0) -> Tensor:
    """Return q * scale: uint8 [ceil(numel / 4)] -> float32 [numel]. The code 11 counts as 0."""
    _check_codes(codes, numel)
    return backend(codes.device).unpack(codes, numel, _rounded(scale))


def unpack_add(target: Tensor, codes: Tensor, scale: float) -> None:
    """Add q * scale to target in place: float32 [n], uint8 [ceil(n / 4)]."""
    _check_vector("target", target)
    _check_codes(codes, target.numel())
    _check_device("codes", codes, target)
    backend(target.device).unpack_add(target, codes, _rounded(scale))


def sketch(x: Tensor, size: int, seed: int) -> Tensor:
    """Return a signed hashed projection: float32 [n] -> float32 [size], size a power of two.

    Block b of x, of `size` elements (zeros beyond n), is permuted and given signs by hashes of
    (seed, b, place), and the blocks are added in order: a count sketch (Charikar et al., 2002)
    in which no two elements of a block collide.
    """
    _check_vector("x", x)
    _check_size(size)
    return backend(x.device).sketch(x, size, _seed(seed))


def unsketch(sketch: Tensor, numel: int, seed: int, scale: float = 1.0) -> Tensor:
    """Return the transpose of `sketch`, times scale: float32 [size] -> float32 [numel]."""
    _check_vector("sketch", sketch)
    _check_size(sketch.numel())
    _check_numel(numel)
    return backend(sketch.device).unsketch(sketch, numel, _seed(seed), _rounded(scale))


# ---- Checks of the arguments ----


def _check_vector(name: str, tensor: Tensor, dtype: torch.dtype = torch.float32) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype != dtype:
        raise ValueError(
            f"{name}: {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}; must be a contiguous vector of "
            f"{str(dtype).removeprefix('torch.')}"
        )


def _check_device(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name}: on {tensor.device}; must be on {other.device}")


def _check_like(name: str, tensor: Tensor | None, x: Tensor) -> None:
    if tensor is None:
        return
    _check_vector(name, tensor)
    _check_device(name, tensor, x)
    if tensor.numel() != x.numel():
        raise ValueError(f"{name}: {tensor.numel()} elements; must be {x.numel()}")


def _check_numel(numel: int) -> None:
    if numel < 0:
        raise ValueError(f"numel: {numel}; must be at least 0")


def _check_codes(codes: Tensor, numel: int) -> None:
    _check_vector("codes", codes, torch.uint8)
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


def _rounded(value: float) -> float:
    """Round a value to float32, the type of all operators."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _finite(name: str, value: float) -> float:
    rounded = _rounded(value)
    if not math.isfinite(rounded):
        raise ValueError(f"{name}: {value}; must be a finite float32")
    return rounded


def _at_least_zero(name: str, value: float) -> float:
    rounded = _finite(name, value)
    if rounded < 0:
        raise ValueError(f"{name}: {value}; must be at least 0")
    return rounded
