"""The last bucket: what is added up over shards beside their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepScalars:
    """Float64 values. Some lie in a list, where Python wants them and making a tensor of them would
    take longer than anything else that becomes of them in a small model's step."""

    head: list[float]
    rest: Tensor
    """On the CPU."""

    @classmethod
    def of(cls, flat: Tensor, num_head: int) -> StepScalars:
        """From one tensor on the CPU."""
        return cls(flat[:num_head].tolist(), flat[num_head:])

    def flat(self) -> Tensor:
        """Both as one tensor."""
        return torch.cat([torch.tensor(self.head, dtype=torch.float64), self.rest])
