"""Clips the change that a client makes to the global state, as one vector of all its floats.

    Δ = w - w_global, of all floating tensors together, buffers and single numbers included
    Δ · min(1, C / ‖Δ‖), computed in float64, rounded to the tensors' types

What is rounded to may be a last bit too long, so it is made shorter until its norm, computed in
float64, is at most C. Integers and bools do not change: they would tell of the client's rows.
Source: McMahan et al. 2018, https://arxiv.org/abs/1710.06963 (flat clipping).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_SHORTER: Final = 2.0**-24
"""The factor is made smaller by this share, then by twice as much, and so on."""


@dataclass(frozen=True, slots=True)
class ClippedChange:
    """The change as it is sent, under the names of the state, on the CPU."""

    tensors: Mapping[str, Tensor]
    is_within: bool
    """It was no longer than the norm before it was clipped."""


def clipped_change(
    base: Mapping[str, Tensor], trained: Mapping[str, Tensor], norm: float
) -> ClippedChange:
    """Return the clipped change from `base` to `trained`. Tied tensors count once, and stay tied.

    A change that is not finite stays so, for the coordinator to reject.
    """
    changes, of_storage, result = dict[str, Tensor](), dict[tuple[object, ...], str](), {}
    for name, tensor in trained.items():
        known = of_storage.setdefault(_place(name, tensor), name)
        result[name] = known
        if known == name:
            changes[name] = _difference(base[name], tensor)
    length = _norm(changes.values())
    is_within = length <= norm
    shrink, sent = 0.0, _scaled(changes, trained, 1.0)
    while _norm(sent.values()) > norm:
        shrink = 2 * shrink or _SHORTER
        sent = _scaled(changes, trained, min(1.0, norm / length) * (1 - shrink))
    return ClippedChange({name: sent[known] for name, known in result.items()}, is_within)


def _place(name: str, tensor: Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common that are tied, and no others."""
    if not tensor.numel():
        return (name,)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _difference(before: Tensor, after: Tensor) -> Tensor:
    """Return the change in float64; zero where the bits are equal, also of what is not finite."""
    after = after.detach().cpu()
    before = before.detach().cpu()
    if not after.is_floating_point():
        return before
    difference = after.double() - before.double()
    return torch.where(after == before, torch.zeros_like(difference), difference)


def _norm(changes: Iterable[Tensor]) -> float:
    squares = [float(c.double().square().sum()) for c in changes if c.is_floating_point()]
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan


def _scaled(
    changes: Mapping[str, Tensor], trained: Mapping[str, Tensor], factor: float
) -> dict[str, Tensor]:
    """Return the changes times a factor in the types that they are sent in."""
    return {
        name: (change * factor).to(trained[name].dtype).contiguous()
        if change.is_floating_point()
        else change.contiguous()
        for name, change in changes.items()
    }
