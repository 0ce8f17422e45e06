"""The scalars of a step: numbers that are added up over shards together with their gradients.

They travel in the last bucket. Only this module knows their order there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

FIRST_REACHED: Final = 3
"""The place of the first parameter's `reached`, after weight, sum of the loss, and stop."""

END: Final = float(1 << 32)
"""What a member adds to `stop` that wishes the training to end before this step: more than there
are shards."""


def num_scalars(num_params: int, num_rest: int) -> int:
    """Returns how many float64 values the scalars of a step with so many parameters are."""
    return FIRST_REACHED + num_params + num_rest


@dataclass(slots=True)
class StepScalars:
    """The scalars of one shard, or their sums over all shards. Those that Python needs are not in a
    tensor: making one of them would take longer than all else done with them in a small model's
    step."""

    weight: float
    """Rows or tokens that the loss counted."""
    loss_sum: float
    """Sum of mean loss · weight."""
    stop: float
    """How many shards were computed by members that wish to stop after this step, and `END`."""
    reached: Sequence[float]
    """By parameter: how many shards' backward reached it. A codec makes the first of them NaN where
    a gradient was not finite, by which all members know."""
    rest: Tensor
    """1-d float64 on the CPU: changes of the buffers, and what else the trainer appends."""

    @classmethod
    def of(cls, flat: Tensor, num_params: int) -> "StepScalars":
        """Takes one tensor on the CPU apart, of which `flat` is the inverse."""
        num_head = FIRST_REACHED + num_params
        weight, loss_sum, stop, *reached = flat[:num_head].tolist()
        return cls(weight, loss_sum, stop, reached, flat[num_head:])

    def flat(self) -> Tensor:
        """Returns all scalars as one tensor."""
        head = [self.weight, self.loss_sum, self.stop, *self.reached]
        return torch.cat([torch.tensor(head, dtype=torch.float64), self.rest])

    @property
    def loss(self) -> float:
        """The mean loss; NaN where nothing was counted."""
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def is_spoiled(self) -> bool:
        """True if a codec met a gradient that was not finite."""
        return math.isnan(self.reached[0])
