"""Run the operators on a CUDA device: allocate the results and launch the Triton programs.

`kernels.ops` chooses between this module and the torch reference, and has checked the arguments.
Nothing here waits for the device. Under TRITON_INTERPRET=1, set before the import, the programs run
on CPU tensors.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from stratagem.worker.kernels.torch import signed

# ---- Launch of the programs ----

BLOCK: Final = 1024
NUM_LEVELS: Final = 5
"""Number of levels of a tree of sums per launch: those that need no second barrier."""


def signs(seed: int, numel: int, device: torch.device) -> Tensor:
    out = torch.empty(numel, dtype=torch.float32, device=device)
    _launch(sign_program, numel, out, signed(seed))
    return out


def sum_magnitudes(x: Tensor, threshold: float) -> Tensor:
    sums, counts = _sums(x), _sums(x, torch.float32)
    args = (x, sums, counts, threshold)
    _launch(magnitude_program, x.numel(), *args, NUM_LEVELS=NUM_LEVELS)
    # They are whole numbers, so the order of addition does not matter.
    return torch.stack([_rest_of_tree(sums), counts.sum(dtype=torch.float64)])


def dot(x: Tensor, y: Tensor) -> Tensor:
    sums = _sums(x)
    _launch(dot_program, x.numel(), x, y, sums, NUM_LEVELS=NUM_LEVELS)
    return _rest_of_tree(sums)


def quantise_deterministic(
    x: Tensor, threshold: float, scale: float, rest: Tensor | None
) -> Tensor:
    return _quantise(x, threshold, scale, 0, rest, is_stochastic=False)


def quantise_stochastic(x: Tensor, scale: float, seed: int) -> Tensor:
    return _quantise(x, 0.0, scale, seed, None, is_stochastic=True)


def _quantise(
    x: Tensor,
    threshold: float,
    scale: float,
    seed: int,
    rest: Tensor | None,
    *,
    is_stochastic: bool,
) -> Tensor:
    codes = torch.empty(-(-x.numel() // 4), dtype=torch.uint8, device=x.device)
    _launch(
        quantise_program,
        x.numel(),
        x,
        codes,
        x if rest is None else rest,
        threshold,
        scale,
        signed(seed),
        IS_STOCHASTIC=is_stochastic,
        HAS_REST=rest is not None,
    )
    return codes


def unpack(codes: Tensor, numel: int, scale: float) -> Tensor:
    out = torch.empty(numel, dtype=torch.float32, device=codes.device)
    _launch(unpack_program, numel, codes, out, scale, ADDS=False)
    return out


def unpack_add(target: Tensor, codes: Tensor, scale: float) -> None:
    _launch(unpack_program, target.numel(), codes, target, scale, ADDS=True)


def sketch(x: Tensor, size: int, seed: int) -> Tensor:
    out = torch.empty(size, dtype=torch.float32, device=x.device)
    num_blocks = -(-x.numel() // size)
    args = (x, out, signed(seed), x.numel(), size, num_blocks)
    _launch_over(sketch_program, size, *args)
    return out


def unsketch(sketch: Tensor, numel: int, seed: int, scale: float) -> Tensor:
    size = sketch.numel()
    out = torch.empty(numel, dtype=torch.float32, device=sketch.device)
    args = (sketch, out, signed(seed), scale, numel, size)
    _launch_over(unsketch_program, -(-numel // size) * size, *args)
    return out


def _rest_of_tree(sums: Tensor) -> Tensor:
    while sums.numel() > 1:
        wider, sums = sums, _sums(sums)
        _launch(tree_program, wider.numel(), wider, sums, NUM_LEVELS=NUM_LEVELS)
    return sums.sum() + 0.0  # of one element, or none; never -0


def _sums(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.empty(-(-x.numel() // (1 << NUM_LEVELS)), dtype=dtype, device=x.device)


def _launch(program: Any, numel: int, *args: Any, **constants: Any) -> None:
    """Launch a program whose last argument is the number of elements."""
    _launch_over(program, numel, *args, numel, **constants)


def _launch_over(program: Any, numel: int, first: Tensor, *args: Any, **constants: Any) -> None:
    """Launch one program instance per BLOCK elements, on the device of the first argument."""
    if numel == 0:
        return
    with torch.cuda.device_of(first):
        # A product and a sum contracted to one operation would round differently.
        program[(-(-numel // BLOCK),)](
            first, *args, BLOCK=BLOCK, enable_fp_fusion=False, **constants
        )


# ---- Triton programs ----
#
# Each program instance works on BLOCK elements and writes only its places, without atomics, so the
# bits depend only on the arguments. The programs use only triton's builtins, none of its library
# functions: those are bound to the compiler or the interpreter when triton is first imported.


@triton.jit
def _lowbias32(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _hash32(seed, i):
    return _lowbias32(_lowbias32(i.to(tl.uint32)) ^ seed.to(tl.uint32))


@triton.jit
def _uniform(seed, i):
    return (_hash32(seed, i) >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def _elements(BLOCK: tl.constexpr):
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _sign(seed, i):
    """Return the sign of element i: +1 if hash32(seed, i) is even, else -1."""
    return 1.0 - 2.0 * (_hash32(seed, i) & 1).to(tl.float32)


@triton.jit(do_not_specialize=["seed"])
def sign_program(out, seed, n, BLOCK: tl.constexpr):
    i = _elements(BLOCK)
    tl.store(out + i, _sign(seed, i), mask=i < n)


@triton.jit(do_not_specialize=["seed"])
def quantise_program(
    x,
    codes,
    rest,
    threshold,
    scale,
    seed,
    n,
    IS_STOCHASTIC: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = _elements(BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    if IS_STOCHASTIC:
        is_kept = _uniform(seed, i) * scale < tl.abs(value)
    else:
        is_kept = tl.abs(value) > threshold
    plus, minus = is_kept & (value > 0), is_kept & (value < 0)
    if HAS_REST:
        sign = plus.to(tl.float32) - minus.to(tl.float32)
        tl.store(rest + i, value - sign * scale, mask=i < n)
    code = plus.to(tl.int32) | (minus.to(tl.int32) << 1)
    low, high = tl.split(tl.reshape(code, [BLOCK // 2, 2]))
    low, high = tl.split(tl.reshape(low | (high << 2), [BLOCK // 4, 2]))
    byte = _elements(BLOCK // 4)
    tl.store(codes + byte, (low | (high << 4)).to(tl.uint8), mask=byte * 4 < n)


@triton.jit
def unpack_program(codes, target, scale, n, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    i = _elements(BLOCK)
    byte = tl.load(codes + i // 4, mask=i < n, other=0).to(tl.int32)
    pair = (byte >> ((i % 4) * 2).to(tl.int32)) & 3
    value = ((pair & 1).to(tl.float32) - (pair >> 1).to(tl.float32)) * scale
    if ADDS:
        value = tl.load(target + i, mask=i < n, other=0.0) + value
    tl.store(target + i, value, mask=i < n)


@triton.jit
def _store_sums(x, sums, n, BLOCK: tl.constexpr, NUM_LEVELS: tl.constexpr):
    """Store some levels of the tree of neighbours. sums: [ceil(n / 2^NUM_LEVELS)] float64."""
    for level in tl.static_range(NUM_LEVELS):
        left, right = tl.split(tl.reshape(x, [BLOCK >> (level + 1), 2]))
        x = left + right
    place = _elements(BLOCK >> NUM_LEVELS)
    tl.store(sums + place, x, mask=place << NUM_LEVELS < n)


@triton.jit
def magnitude_program(x, sums, counts, threshold, n, BLOCK: tl.constexpr, NUM_LEVELS: tl.constexpr):
    """Store sums and counts of magnitudes; counts is [ceil(n / 2^NUM_LEVELS)] float32. A NaN counts
    as above the threshold."""
    i = _elements(BLOCK)
    magnitude = tl.abs(tl.load(x + i, mask=i < n, other=0.0))
    is_above = (i < n) & ((magnitude > threshold) | (magnitude != magnitude))
    _store_sums(tl.where(is_above, magnitude, 0.0).to(tl.float64), sums, n, BLOCK, NUM_LEVELS)
    _store_sums(is_above.to(tl.float32), counts, n, BLOCK, NUM_LEVELS)


@triton.jit
def dot_program(x, y, sums, n, BLOCK: tl.constexpr, NUM_LEVELS: tl.constexpr):
    i = _elements(BLOCK)
    left = tl.load(x + i, mask=i < n, other=0.0).to(tl.float64)
    right = tl.load(y + i, mask=i < n, other=0.0).to(tl.float64)
    _store_sums(left * right, sums, n, BLOCK, NUM_LEVELS)


@triton.jit
def tree_program(x, sums, n, BLOCK: tl.constexpr, NUM_LEVELS: tl.constexpr):
    i = _elements(BLOCK)
    _store_sums(tl.load(x + i, mask=i < n, other=0.0), sums, n, BLOCK, NUM_LEVELS)


@triton.jit
def _projection(seed, block, j, size):
    """Return the place in the block that place j of the block's sketch reads, and its sign."""
    factor = _hash32(seed, block * 2) | 1
    shift = _hash32(seed, block * 2 + 1)
    place = (factor * j.to(tl.uint32) + shift) & (size - 1)
    return place, _sign(seed.to(tl.uint32) ^ 0x9E3779B9, block * size + j)


@triton.jit(do_not_specialize=["seed", "size", "num_blocks"])
def sketch_program(x, sketch, seed, n, size, num_blocks, BLOCK: tl.constexpr):
    j = _elements(BLOCK)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for number in range(num_blocks):
        block = tl.full([BLOCK], 0, tl.int64) + number
        place, sign = _projection(seed, block, j, size)
        i = block * size + place.to(tl.int64)
        total += sign * tl.load(x + i, mask=i < n, other=0.0)
    tl.store(sketch + j, total, mask=j < size)


@triton.jit(do_not_specialize=["seed", "size"])
def unsketch_program(sketch, x, seed, scale, n, size, BLOCK: tl.constexpr):
    p = _elements(BLOCK)
    block, j = p // size, p % size
    place, sign = _projection(seed, block, j, size)
    i = block * size + place.to(tl.int64)
    value = sign * tl.load(sketch + j, mask=j < size, other=0.0) * scale
    tl.store(x + i, value, mask=i < n)
