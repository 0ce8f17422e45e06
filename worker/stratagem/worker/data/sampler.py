"""Selects and shuffles the rows of each step's batch, as a pure function of the step.

The position in the data derives from the number of applied steps alone, so it needs no state of
its own and a resumed run continues exactly. Must not know data sets.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError

_BLOCK: Final = 256
"""Batches that are cut off the order at once; one by one it would be 8 µs of each step."""


class BatchOrder:
    """Batches of `num_rows` rows, reshuffled in each epoch from seed + epoch."""

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        if num_rows < 1:
            raise InvalidInputError.at("data.train", "has no rows")
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.steps_per_epoch = math.ceil(num_rows / batch_size)
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)
        self._block: tuple[int, int] | None = None
        self._batches: Sequence[Tensor] = ()

    def batch(self, step: int) -> tuple[int, Tensor]:
        """Returns (epoch, indices) of the batch that comes after `step` applied steps."""
        epoch, position = divmod(step, self.steps_per_epoch)
        number, place = divmod(position, _BLOCK)
        if (epoch, number) != self._block:
            self._cut(epoch, number)
        return epoch, self._batches[place]

    def _cut(self, epoch: int, number: int) -> None:
        """Makes the batches of one block."""
        if epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.num_rows, self._seed + epoch)
        rows = _BLOCK * self.batch_size
        block = self._order[number * rows : (number + 1) * rows]
        self._batches = torch.split(block, self.batch_size)
        self._block = epoch, number


def epoch_order(num_rows: int, seed: int) -> Tensor:
    """Returns the order of all rows in one epoch: a permutation of their indices."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
