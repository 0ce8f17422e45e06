"""The 2-norm of all gradients together, and the order in which it is added up.

By the rules of `numerics` 2 each block of 65,536 elements of a parameter gives its norm in float64,
and the squares of all blocks, in order of parameter, are added over the binary tree of neighbours.
So a holder of only some blocks can find its part, and the whole has the same bits, also with
another number of threads. By the rules of 1 it is the norm of the parameters' norms, in their type.
"""

import math
from collections.abc import Sequence
from operator import add
from typing import Final

import numpy as np
import torch
from torch import Tensor

from stratagem.common.numerics.shards import pairwise_sum

BLOCK: Final = 65_536
_FEW: Final = 256
"""Numbers that Python adds before numpy has begun."""


def parts_of(grads: Sequence[Tensor], numerics: int) -> list[Tensor]:
    """Returns for each gradient what `total_norm` needs: the norms of its blocks (1-d; 0-d where
    there is just one), or its norm."""
    if numerics < 2:
        return [torch.linalg.vector_norm(grad, 2.0) for grad in grads]
    return [_of_blocks(grad) for grad in grads]


def divided(grad: Tensor, divisor: float, numerics: int) -> Tensor:
    """Divides a gradient in place and returns what `total_norm` needs of the result."""
    if numerics >= 2 and grad.is_cpu and grad.is_contiguous():
        return _of_blocks(grad, divisor)
    (part,) = parts_of([grad.div_(divisor)], numerics)
    return part


def total_norm(parts: Sequence[Tensor], numerics: int) -> Tensor:
    """Returns the 2-norm (0-d) of gradients of which these are the parts; 0 for none."""
    if not parts:
        return torch.zeros((), dtype=torch.float32 if numerics < 2 else torch.float64)
    device = parts[0].device
    if numerics < 2:
        total: Tensor = torch.linalg.vector_norm(torch.stack([p.to(device) for p in parts]), 2.0)
        return total
    if all([part.is_cpu for part in parts]):
        norms: list[float] = []
        for part in parts:
            norms += part.tolist() if part.dim() else (part.item(),)
    else:
        norms = torch.cat([part.to(device).reshape(-1) for part in parts]).tolist()
    norm = torch.scalar_tensor(math.sqrt(_sum_of_squares(norms)), dtype=torch.float64)
    return norm if parts[0].is_cpu else norm.to(device)


class FewGradients:
    """Computes the bits of `parts_of` faster for gradients on the CPU that stay in a core's cache,
    where calls cost more than numbers: room for their copies is made once."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        """shapes: of at most one block each."""
        self._copies = [torch.empty(shape, dtype=torch.float64) for shape in shapes]

    def parts(self, grads: Sequence[Tensor | None], numerics: int) -> list[Tensor]:
        """Returns the result of `parts_of` for the gradients that are not None."""
        here = [grad for grad in grads if grad is not None]
        if not here or numerics < 2:
            return list(torch._foreach_norm(here, 2.0)) if here else []
        copies = self._copies
        if len(here) < len(grads):
            copies = [c for c, grad in zip(copies, grads, strict=True) if grad is not None]
        torch._foreach_copy_(copies, here)
        return list(torch._foreach_norm(copies, 2.0))


def _of_blocks(grad: Tensor, divisor: float | None = None) -> Tensor:
    """Returns the norm of each block; a divisor is applied first, block by block, while they are in
    the cache."""
    flat = grad.detach().reshape(-1)
    if not grad.is_cpu:
        return _norms(flat)
    # A cast inside the norm would take twice as long: its copy is a new one every time.
    wide = torch.empty(min(BLOCK, flat.numel()), dtype=torch.float64)
    norms = []
    for block in torch.split(flat, BLOCK):
        if divisor is not None:
            block.div_(divisor)
        room = wide if block.numel() == wide.numel() else wide[: block.numel()]
        norms.append(torch.linalg.vector_norm(room.copy_(block)))
    return norms[0] if len(norms) == 1 else torch.stack(norms)


def _norms(flat: Tensor) -> Tensor:
    """Returns the norm of each block, computed for all whole blocks at once."""
    if flat.numel() <= BLOCK:
        norm: Tensor = torch.linalg.vector_norm(flat, 2.0, dtype=torch.float64)
        return norm
    whole = flat.numel() - flat.numel() % BLOCK
    parts = [flat[:whole].view(-1, BLOCK)] + [flat[whole:].view(1, -1)] * (whole < flat.numel())
    return torch.cat(
        [torch.linalg.vector_norm(part, 2.0, dim=1, dtype=torch.float64) for part in parts]
    )


def _sum_of_squares(norms: list[float]) -> float:
    if len(norms) > _FEW:
        values = np.array(norms)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the sum
            return pairwise_sum(values * values)
    squares = [norm * norm for norm in norms]
    while len(squares) > 1:  # as `tree_sum` does
        above = list(map(add, squares[::2], squares[1::2]))
        squares = above if len(squares) % 2 == 0 else [*above, squares[-1]]
    return squares[0]
