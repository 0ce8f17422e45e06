"""Operators on flat float32 vectors for which torch has no fused one.

`kernel_ops` is the entry: it checks arguments and takes the Triton programs for CUDA tensors, the
torch reference for all others; both give the same bits. Formulas are in
docs/explanation/kernels.md. Must not know gradients, members or codecs.
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
