"""The operations of every exchange: a tensor that goes to or comes from a peer, and a sum of
two."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Transfer:
    peer: int
    tag: int
    """Within the step."""
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Addition:
    """One sum, out = left + right; a copy when there is no right."""

    out: Tensor
    left: Tensor
    right: Tensor | None

    def run(self) -> None:
        if self.right is None:
            self.out.copy_(self.left)
        else:
            torch.add(self.left, self.right, out=self.out)
