"""The layout of gradient buckets: each parameter's bucket, and its slot there.

Follows from names, shapes and dtypes only and never changes afterwards, so that a run which
resumes, or a member which joins late, adds in the same places. Parameters go in reverse order,
which is about the order in which backward finishes them; the first bucket is small so that the
exchange starts early. The last bucket holds the extras. Allocates no tensors.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
CODED_BUCKET_BYTES = 4 << 20
"""With a codec, where the link waits for a bucket to be coded as well as for its backward."""
LENT_BUCKET_BYTES = 4 << 20
"""Where buckets are given back, so that few bytes of gradients are under way at once."""
SLOT_BYTES = 64
"""Slots begin at multiples of this: the bits of a GEMM depend on the alignment of its operands."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place. `index` is its place among the parameters as they were given."""

    index: int
    name: str
    bucket: int
    offset: int
    """In elements of the bucket."""
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class FlatVector:
    """A flat vector that is exchanged as a whole."""

    dtype: torch.dtype
    numel: int

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BucketLayout:
    slots: tuple[Slot, ...]
    """In the order of the parameters."""
    buckets: tuple[FlatVector, ...]
    """The last one is the extras."""

    @property
    def digest(self) -> str:
        lines = [f"{s.name} {s.bucket} {s.offset} {tuple(s.shape)}" for s in self.slots]
        lines += [f"{b.dtype} {b.numel}" for b in self.buckets]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def plan_layout(
    params: Sequence[tuple[str, torch.dtype, torch.Size]],
    *,
    num_extras: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> BucketLayout:
    """Fills buckets greedily in reverse order; a bucket has one dtype and at least one slot."""
    slots: list[Slot] = []
    dtypes: list[torch.dtype] = []
    sizes: list[int] = []  # elements
    for index in reversed(range(len(params))):
        name, param_dtype, shape = params[index]
        dtype = _bucket_dtype(name, param_dtype)
        step = SLOT_BYTES // dtype.itemsize
        numel = -(-shape.numel() // step) * step
        limit_bytes = min(FIRST_BUCKET_BYTES, bucket_bytes) if len(sizes) == 1 else bucket_bytes
        fits = sizes and (sizes[-1] + numel) * dtype.itemsize <= limit_bytes
        if not fits or dtypes[-1] != dtype:
            dtypes.append(dtype)
            sizes.append(0)
        slots.append(Slot(index, name, len(sizes) - 1, sizes[-1], shape))
        sizes[-1] += numel
    buckets = [FlatVector(d, n) for d, n in zip(dtypes, sizes, strict=True)]
    return BucketLayout(tuple(reversed(slots)), (*buckets, FlatVector(torch.float64, num_extras)))


def _bucket_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise ValueError(f"parameter {name} is {dtype}; gradients are summed for floats only")
    return torch.promote_types(dtype, torch.float32)
