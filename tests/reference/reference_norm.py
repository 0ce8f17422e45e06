"""The 2-norm of all gradients, as the loops clip by it, written down from its rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def gradient_norm(params: Sequence[nn.Parameter], numerics: int) -> Tensor:
    """0-d. Under 2 float64 norms of blocks of 65,536 elements, whose squares are added over the
    binary tree of neighbours; under 1 as torch does."""
    grads = [param.grad for param in params if param.grad is not None]
    if numerics < 2:
        return nn.utils.get_total_norm(grads, foreach=False)
    squares = [
        norm.item() * norm.item()
        for grad in grads
        for block in torch.split(grad.reshape(-1), 65_536)
        for norm in [torch.linalg.vector_norm(block.double())]
    ]
    while len(squares) > 1:
        pairs = [squares[i : i + 2] for i in range(0, len(squares), 2)]
        squares = [sum(pair[1:], start=pair[0]) for pair in pairs]
    return torch.tensor(math.sqrt(squares[0]) if squares else 0.0, dtype=torch.float64)
