"""The 2-norm of all gradients together, and the order in which it is added up.

By the rules of `numerics` 2 each block of 65,536 elements of a parameter gives its norm in float64,
and the squares of all blocks, in order of parameter, are added over the binary tree of neighbours.
So whoever holds some blocks only can find its part, and the whole has the same bits. By the
rules of 1 it is the norm of the parameters' norms, in their own type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from stratagem.common.compression.sums import tree_sum

BLOCK: Final = 65_536
_FEW: Final = 64
"""Numbers that Python adds before numpy has begun."""


def norms_of(grads: Sequence[Tensor], numerics: int) -> list[Tensor]:
    """What `total_norm` wants of each gradient: its norm, or those of its blocks (1-d; 0-d where
    there is just one)."""
    if numerics < 2:
        return [torch.linalg.vector_norm(grad, 2.0) for grad in grads]
    small = [grad for grad in grads if grad.numel() <= BLOCK]
    found = iter(torch._foreach_norm(small, 2.0, dtype=torch.float64) if small else ())
    if len(small) == len(grads):
        return list(found)
    return [next(found) if grad.numel() <= BLOCK else _of_blocks(grad) for grad in grads]


def norms_of_few(grads: list[Tensor], numerics: int) -> list[Tensor]:
    """The same bits in one call, for gradients that stay in a core's cache."""
    if numerics < 2 and grads:
        return list(torch._foreach_norm(grads, 2.0))
    return norms_of(grads, numerics)


def divided(grad: Tensor, divisor: float, numerics: int) -> Tensor:
    """Divides a gradient in place; what `total_norm` wants of it then."""
    if numerics >= 2 and grad.is_cpu and grad.numel() > BLOCK and grad.is_contiguous():
        return _of_blocks(grad, divisor)
    (found,) = norms_of([grad.div_(divisor)], numerics)
    return found


def total_norm(norms: Sequence[Tensor], numerics: int) -> Tensor:
    """The 2-norm (0-d) of gradients that have these together; 0 for none."""
    if not norms:
        return torch.zeros((), dtype=torch.float32 if numerics < 2 else torch.float64)
    device = norms[0].device
    if any(norm.device != device for norm in norms):
        norms = [norm.to(device) for norm in norms]
    if numerics < 2:
        found: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), 2.0)
        return found
    if all(norm.dim() == 0 for norm in norms):
        blocks = torch.stack(list(norms))
    else:
        blocks = torch.cat([norm.reshape(-1) for norm in norms])
    return torch.tensor(math.sqrt(_sum_of_squares(blocks)), dtype=torch.float64, device=device)


def _of_blocks(grad: Tensor, divisor: float | None = None) -> Tensor:
    """The norm of each block; a divisor comes first, block by block, while they are warm."""
    flat = grad.detach().reshape(-1)
    if not grad.is_cpu:
        whole = flat.numel() - flat.numel() % BLOCK
        parts = [flat[:whole].view(-1, BLOCK), flat[whole:].view(1, -1)]
        return torch.cat(
            [
                torch.linalg.vector_norm(part, 2.0, dim=1, dtype=torch.float64)
                for part in parts
                if part.numel()
            ]
        )
    # A cast inside the norm would take twice as long: its copy is a new one every time.
    wide = torch.empty(min(BLOCK, flat.numel()), dtype=torch.float64)
    norms = []
    for block in torch.split(flat, BLOCK):
        if divisor is not None:
            block.div_(divisor)
        norms.append(torch.linalg.vector_norm(wide[: block.numel()].copy_(block)))
    return torch.stack(norms)


def _sum_of_squares(norms: Tensor) -> float:
    if norms.numel() > _FEW:
        values = norms.cpu().numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # who calls looks at the sum
            return tree_sum(values * values)
    squares: list[float] = [each * each for each in norms.tolist()]
    while len(squares) > 1:  # as `tree_sum` does
        if len(squares) % 2:
            squares.append(0.0)
        squares = [a + b for a, b in zip(squares[::2], squares[1::2], strict=True)]
    return squares[0]
