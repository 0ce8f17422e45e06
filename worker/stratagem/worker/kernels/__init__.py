"""Operators on flat float32 vectors for which torch has no fused kernel.

CUDA tensors go to Triton programs, all others to the torch reference; both give the same bits.
Formulas are in docs/explanation/kernels.md.
"""

from stratagem.worker.kernels.ops import (
    dot,
    quantise_deterministic,
    quantise_stochastic,
    runs_programs,
    signs,
    sketch,
    sum_magnitudes,
    unpack,
    unpack_add,
    unsketch,
)

__all__ = [
    "dot",
    "quantise_deterministic",
    "quantise_stochastic",
    "runs_programs",
    "signs",
    "sketch",
    "sum_magnitudes",
    "unpack",
    "unpack_add",
    "unsketch",
]
