"""The operators on a CUDA device: allocates the answers and launches the Triton programs.

Replaces `torch_kernels`; `kernel_ops` chooses and has checked the arguments. Nothing here waits for
the device. Under TRITON_INTERPRET=1, set before the import, the programs run on CPU tensors.
"""

from typing import Any, Final

import torch
from torch import Tensor

from stratagem.worker.kernels import triton_programs
from stratagem.worker.kernels.torch_kernels import signed

BLOCK: Final = 1024
NUM_LEVELS: Final = 5
"""Of a tree of sums in one launch: as far as a program instance comes without a second barrier."""


def signs(seed: int, numel: int, device: torch.device) -> Tensor:
    out = torch.empty(numel, dtype=torch.float32, device=device)
    _launch(triton_programs.sign_program, numel, out, signed(seed))
    return out


def sum_magnitudes(x: Tensor, threshold: float) -> Tensor:
    sums, counts = _sums(x), _sums(x, torch.float32)
    args = (x, sums, counts, threshold)
    _launch(triton_programs.magnitude_program, x.numel(), *args, NUM_LEVELS=NUM_LEVELS)
    # Whole numbers: the order in which they are added does not matter.
    return torch.stack([_rest_of_tree(sums), counts.sum(dtype=torch.float64)])


def dot(x: Tensor, y: Tensor) -> Tensor:
    sums = _sums(x)
    _launch(triton_programs.dot_program, x.numel(), x, y, sums, NUM_LEVELS=NUM_LEVELS)
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
        triton_programs.quantise_program,
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
    _launch(triton_programs.unpack_program, numel, codes, out, scale, ADDS=False)
    return out


def unpack_add(target: Tensor, codes: Tensor, scale: float) -> None:
    _launch(triton_programs.unpack_program, target.numel(), codes, target, scale, ADDS=True)


def sketch(x: Tensor, size: int, seed: int) -> Tensor:
    out = torch.empty(size, dtype=torch.float32, device=x.device)
    num_blocks = -(-x.numel() // size)
    args = (x, out, signed(seed), x.numel(), size, num_blocks)
    _launch_over(triton_programs.sketch_program, size, *args)
    return out


def unsketch(sketch: Tensor, numel: int, seed: int, scale: float) -> Tensor:
    size = sketch.numel()
    out = torch.empty(numel, dtype=torch.float32, device=sketch.device)
    args = (sketch, out, signed(seed), scale, numel, size)
    _launch_over(triton_programs.unsketch_program, -(-numel // size) * size, *args)
    return out


def _rest_of_tree(sums: Tensor) -> Tensor:
    while sums.numel() > 1:
        wider, sums = sums, _sums(sums)
        _launch(triton_programs.tree_program, wider.numel(), wider, sums, NUM_LEVELS=NUM_LEVELS)
    return sums.sum() + 0.0  # of one, or of none; never -0


def _sums(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.empty(-(-x.numel() // (1 << NUM_LEVELS)), dtype=dtype, device=x.device)


def _launch(program: Any, numel: int, *args: Any, **constants: Any) -> None:
    """Like _launch_over, for programs whose last argument is the number of elements."""
    _launch_over(program, numel, *args, numel, **constants)


def _launch_over(program: Any, numel: int, first: Tensor, *args: Any, **constants: Any) -> None:
    """One instance of the program per BLOCK elements, on the device of its first argument."""
    if numel == 0:
        return
    with torch.cuda.device_of(first):
        # A product and a sum contracted to one operation would round differently.
        program[(-(-numel // BLOCK),)](
            first, *args, BLOCK=BLOCK, enable_fp_fusion=False, **constants
        )
