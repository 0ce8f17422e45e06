"""The operators on a CUDA device: allocates the answers and launches the Triton programs.

Takes the place of `reference`; `ops` chooses and has checked the arguments. Nothing here waits for
the device. Under TRITON_INTERPRET=1, set before the import, the programs run on CPU tensors.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from stratagem.worker.kernels import programs

BLOCK: Final = 1024
NUM_LEVELS: Final = 5
"""Of a tree of sums in one launch: as far as a program instance comes without a second barrier."""


def hash32(seed: int, indices: Tensor) -> Tensor:
    out = torch.empty_like(indices)
    _launch(programs.hash_program, out.numel(), indices, out, _signed(seed), IS_UNIFORM=False)
    return out


def uniform(seed: int, indices: Tensor) -> Tensor:
    out = torch.empty_like(indices, dtype=torch.float32)
    _launch(programs.hash_program, out.numel(), indices, out, _signed(seed), IS_UNIFORM=True)
    return out


def quantise_deterministic(
    x: Tensor, threshold: float, residual: Tensor | None, scale: float
) -> Tensor:
    return _quantise(x, residual, threshold, scale, 0, is_stochastic=False)


def quantise_stochastic(x: Tensor, scale: float, seed: int, residual: Tensor | None) -> Tensor:
    return _quantise(x, residual, 0.0, scale, seed, is_stochastic=True)


def _quantise(
    x: Tensor,
    residual: Tensor | None,
    threshold: float,
    scale: float,
    seed: int,
    *,
    is_stochastic: bool,
) -> Tensor:
    codes = torch.empty(-(-x.numel() // 4), dtype=torch.uint8, device=x.device)
    _launch(
        programs.quantise_program,
        x.numel(),
        x,
        x if residual is None else residual,
        codes,
        threshold,
        scale,
        _signed(seed),
        IS_STOCHASTIC=is_stochastic,
        HAS_RESIDUAL=residual is not None,
    )
    return codes


def unpack(codes: Tensor, numel: int, scale: float) -> Tensor:
    out = torch.empty(numel, dtype=torch.float32, device=codes.device)
    _launch(programs.unpack_program, numel, codes, out, scale, ADDS=False)
    return out


def unpack_add(target: Tensor, codes: Tensor, scale: float) -> None:
    _launch(programs.unpack_program, target.numel(), codes, target, scale, ADDS=True)


def accumulate(target: Tensor, source: Tensor, weight: float) -> Tensor:
    sums = _sums(target)
    _launch(
        programs.accumulate_program,
        target.numel(),
        target,
        source,
        sums,
        weight,
        NUM_LEVELS=NUM_LEVELS,
    )
    while sums.numel() > 1:
        wider, sums = sums, _sums(sums)
        _launch(programs.tree_program, wider.numel(), wider, sums, NUM_LEVELS=NUM_LEVELS)
    return sums.sum()  # of one, or of none


def sketch(x: Tensor, size: int, seed: int) -> Tensor:
    out = torch.empty(size, dtype=torch.float32, device=x.device)
    num_blocks = -(-x.numel() // size)
    args = (x, out, _signed(seed), x.numel(), size, num_blocks)
    _launch_over(programs.sketch_program, size, *args)
    return out


def unsketch(sketch: Tensor, numel: int, seed: int, scale: float) -> Tensor:
    size = sketch.numel()
    out = torch.empty(numel, dtype=torch.float32, device=sketch.device)
    args = (sketch, out, _signed(seed), scale, numel, size)
    _launch_over(programs.unsketch_program, -(-numel // size) * size, *args)
    return out


def _sums(x: Tensor) -> Tensor:
    return torch.empty(-(-x.numel() // (1 << NUM_LEVELS)), dtype=torch.float64, device=x.device)


def _signed(seed: int) -> int:
    """The same 32 bits as a number that triton passes in 32 bits, whatever it is."""
    return seed - (1 << 32) if seed >> 31 else seed


def _launch(program: Any, numel: int, *args: Any, **constants: Any) -> None:
    """Like _launch_over, for programs whose last argument is the number of elements."""
    _launch_over(program, numel, *args, numel, **constants)


def _launch_over(program: Any, numel: int, first: Tensor, *args: Any, **constants: Any) -> None:
    """One instance of the program per BLOCK elements, on the device of its first argument."""
    if numel == 0:
        return
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        # A product and a sum contracted to one operation would round differently.
        program[(-(-numel // BLOCK),)](
            first, *args, BLOCK=BLOCK, enable_fp_fusion=False, **constants
        )
