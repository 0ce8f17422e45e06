"""Which rows make the batch of a step: a pure function of the step.

The position in the data derives from the number of applied steps alone, so it needs no state of
its own and a resumed run continues exactly. Must not know data sets.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stratagem.common.errors import InvalidInputError


class BatchOrder:
    """Batches of `num_rows` rows, shuffled anew in each epoch from seed + epoch."""

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        if num_rows < 1:
            raise InvalidInputError.at("data.train", "has no rows")
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.steps_per_epoch = math.ceil(num_rows / batch_size)
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def batch(self, step: int) -> tuple[int, Tensor]:
        """(epoch, indices) of the batch that comes after `step` applied steps."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.num_rows, self._seed + epoch)
        start = position * self.batch_size
        return epoch, self._order[start : start + self.batch_size]


def epoch_order(num_rows: int, seed: int) -> Tensor:
    """The order of all rows in one epoch."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
