"""Selects and shuffles the rows of each step's batch, as a pure function of the step.

The position in the data derives from the number of applied steps alone, so it needs no state of
its own and a resumed run continues exactly. Must not know data sets.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError

_BLOCK: Final = 256
"""Batches that are cut off the order at once; one by one it would be 8 µs of each step."""
_NUM_KEPT: Final = 2
"""Blocks and orders: batches are read ahead while steps are still in the block before."""


EpochRows = Callable[[int], Tensor | list[Tensor]]
"""The rows of an epoch in order, or its batches."""


class BatchOrder:
    """Batches of `num_rows` rows, reshuffled in each epoch from seed + epoch.

    epoch_rows: another order; each epoch of it must have as many batches as the first.
    """

    def __init__(
        self, num_rows: int, batch_size: int, seed: int, epoch_rows: EpochRows | None = None
    ) -> None:
        if num_rows < 1:
            raise InvalidInputError.at("data.train", "has no rows")
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.steps_per_epoch = math.ceil(num_rows / batch_size)
        self._epoch_rows = epoch_rows or (lambda epoch: epoch_order(num_rows, seed + epoch))
        self._orders: OrderedDict[int, Tensor | list[Tensor]] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, int], Sequence[Tensor]] = OrderedDict()
        if epoch_rows is not None:
            self.steps_per_epoch = max(1, self._num_batches(epoch_rows(0)))

    def batch(self, step: int) -> tuple[int, Tensor]:
        """Returns (epoch, indices) of the batch that comes after `step` applied steps."""
        epoch, position = divmod(step, self.steps_per_epoch)
        number, place = divmod(position, _BLOCK)
        batches = self._blocks.get((epoch, number))
        if batches is None:
            batches = self._blocks[epoch, number] = self._cut(epoch, number)
            if len(self._blocks) > _NUM_KEPT:
                self._blocks.popitem(last=False)
        return epoch, batches[place]

    def _cut(self, epoch: int, number: int) -> Sequence[Tensor]:
        """Makes the batches of one block."""
        order = self._orders.get(epoch)
        if order is None:
            order = self._epoch_rows(epoch)
            if self._num_batches(order) != self.steps_per_epoch:
                raise InvalidInputError.at(
                    "data.order",
                    f"gives {self._num_batches(order)} batches for epoch {epoch} and "
                    f"{self.steps_per_epoch} for epoch 0; all epochs must have as many",
                )
            self._orders[epoch] = order
            if len(self._orders) > _NUM_KEPT:
                self._orders.popitem(last=False)
        if isinstance(order, list):
            return order[number * _BLOCK : (number + 1) * _BLOCK]
        rows = _BLOCK * self.batch_size
        return torch.split(order[number * rows : (number + 1) * rows], self.batch_size)

    def _num_batches(self, order: Tensor | list[Tensor]) -> int:
        return len(order) if isinstance(order, list) else math.ceil(len(order) / self.batch_size)


class StreamOrder:
    """Batches of rows of a stream, which are numbered on and on: they have no epochs in common."""

    steps_per_epoch: Final = 1

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def batch(self, step: int) -> tuple[int, Tensor]:
        """Returns (0, numbers) of the rows of the batch that comes after `step` applied steps."""
        return 0, torch.arange(step * self.batch_size, (step + 1) * self.batch_size)


def epoch_order(num_rows: int, seed: int) -> Tensor:
    """Returns the order of all rows in one epoch: a permutation of their indices."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
