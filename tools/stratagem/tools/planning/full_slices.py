"""What a member holds less where each keeps a slice of parameters and gradients, too."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from stratagem.worker.engine.gathered_blocks import divide_parameters
from stratagem.worker.exchange.buckets import NUM_WINDOWS
from stratagem.worker.exchange.layout import LENT_BUCKET_BYTES, BucketLayout, plan_layout
from stratagem.worker.numerics.model import layers_of

_NUM_UNDER_WAY = 2
"""Buckets that backward is filling, or that wait for a window."""


@dataclass(frozen=True, slots=True)
class FullSavings:
    """Bytes that are not on a member; negative where it holds more."""

    parameters: int
    gradients: int


def lent_layout(params: Sequence[tuple[str, nn.Parameter]], num_extras: int) -> BucketLayout:
    """Return the layout of buckets that give their memory back."""
    shapes = [(name, param.dtype, param.shape) for name, param in params]
    return plan_layout(shapes, num_extras=num_extras, bucket_bytes=LENT_BUCKET_BYTES)


def full_savings(
    model: nn.Module,
    params: Sequence[tuple[str, nn.Parameter]],
    layout: BucketLayout,
    share: float,
    *,
    gives_back: bool,
    num_sets: int,
    is_one_pass: bool,
) -> FullSavings:
    """Return what the member with the largest share saves.

    share: of all trained elements, those that it holds, its own and those of a mirror. gives_back:
    buckets of gradients are freed in the step, as those of a lone member are not. is_one_pass: it
    computes one micro-batch in each step; else sums over its own stay whole.
    """
    trained = sum(param.nbytes for _, param in params)
    rest, *blocks = divide_parameters([param for _, param in params], layers_of(model))
    gathered = _nbytes(rest.params) + max((_nbytes(each.params) for each in blocks), default=0)
    owned = round(share * trained)
    sizes = [bucket.size_bytes for bucket in layout.buckets[:-1]]
    widest, whole = max(sizes, default=0), sum(sizes)
    gradients = 0
    if gives_back:
        under_way = min(whole, _NUM_UNDER_WAY * widest) if is_one_pass else num_sets * whole
        held = round(share * whole) + NUM_WINDOWS * widest * num_sets + under_way
        gradients = num_sets * whole - held
    return FullSavings(trained - owned - gathered, gradients)


def _nbytes(params: Sequence[nn.Parameter]) -> int:
    return sum(param.nbytes for param in params)
