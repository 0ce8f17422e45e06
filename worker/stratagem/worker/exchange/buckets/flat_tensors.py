"""Whole tensors as flat buckets and back; for tensors that travel as they are.

Gradients are another matter: their buckets are storage of their own, see `bucket_layout`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

FLAT_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype that travel together; a large one alone."""

    indices: tuple[int, ...]
    """Places among the tensors that were given."""
    dtype: torch.dtype
    numel: int


def plan_buckets(tensors: Sequence[Tensor]) -> tuple[Bucket, ...]:
    """Groups the tensors in order, as many to a bucket as fit; follows from shapes and dtypes
    only."""
    groups: list[list[int]] = []
    numel = 0
    for index, tensor in enumerate(tensors):
        size = numel + tensor.numel()
        same = groups and tensors[groups[-1][0]].dtype == tensor.dtype
        if not same or size * tensor.itemsize > FLAT_BYTES:
            groups.append([])
            size = tensor.numel()
        groups[-1].append(index)
        numel = size
    buckets = (
        Bucket(tuple(group), tensors[group[0]].dtype, sum(tensors[i].numel() for i in group))
        for group in groups
    )
    return tuple(bucket for bucket in buckets if bucket.numel)


def flatten(bucket: Bucket, tensors: Sequence[Tensor], flat: Tensor) -> Tensor:
    """Copies the bucket's tensors into a flat one, converting to its dtype."""
    start = 0
    for index in bucket.indices:
        tensor = tensors[index]
        flat[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
        start += tensor.numel()
    return flat


def unflatten(bucket: Bucket, flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies a flat bucket back into its tensors and rounds to each tensor's dtype."""
    start = 0
    for index in bucket.indices:
        tensor = tensors[index]
        tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
