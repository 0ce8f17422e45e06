"""The values of the last bucket: scalars that are added up over shards together with their
gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepScalars:
    """Float64 values that are added up over shards. The first are in a list, where Python needs
    them and making a tensor of them would take longer than all else done with them in a small
    model's step."""

    head: list[float]
    rest: Tensor
    """On the CPU."""

    @classmethod
    def of(cls, flat: Tensor, num_head: int) -> StepScalars:
        """Splits one tensor on the CPU into the head, `num_head` values, and the rest."""
        return cls(flat[:num_head].tolist(), flat[num_head:])

    def flat(self) -> Tensor:
        """Returns head and rest as one tensor."""
        return torch.cat([torch.tensor(self.head, dtype=torch.float64), self.rest])
