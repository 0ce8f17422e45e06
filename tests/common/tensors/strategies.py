"""Random tensors of every element type, for the tests of the tensor stream."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from stratagem.common.tensors.torch_codec import TORCH_DTYPES

SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (0, 4), (2, 1, 3), (40, 33), (30_001,)])
NAMES = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)


def make_tensor(dtype: str, shape: tuple[int, ...], seed: int, layout: str) -> torch.Tensor:
    """Random bits of a type; bits that no value has (bool) are avoided."""
    generator = torch.Generator().manual_seed(seed)
    kind = TORCH_DTYPES[dtype]
    count = math.prod(shape) * kind.itemsize
    raw = torch.randint(0, 2 if kind is torch.bool else 256, (count,), generator=generator)
    tensor = raw.to(torch.uint8).view(kind).reshape(shape)
    if layout == "strided" and tensor.ndim:
        wide = torch.stack([tensor, tensor], dim=-1)
        return wide[..., 0]
    if layout == "transposed" and tensor.ndim >= 2:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    return tensor


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal type, shape and bits, also where values are NaN."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    flat = [
        each.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        for each in (left, right)
    ]
    return torch.equal(*flat)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """A few named tensors, some of them tied."""
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    named: dict[str, torch.Tensor] = {}
    for index, name in enumerate(names):
        if named and draw(st.integers(0, 4)) == 0:
            named[name] = named[draw(st.sampled_from(sorted(named)))]
            continue
        named[name] = make_tensor(
            draw(st.sampled_from(sorted(TORCH_DTYPES))),
            draw(SHAPES),
            index,
            draw(st.sampled_from(["plain", "strided", "transposed"])),
        )
    return named
