"""Select and shuffle the rows of each step's batch, as a pure function of the step.

The position in the data derives from the number of applied steps alone, so it needs no state, and a
resumed run continues exactly.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec
from stratagem.common.numerics.keys import mix
from stratagem.worker.data.datasets import Dataset, TensorDataset
from stratagem.worker.data.rows import RowDataset, generators_kept, seed_generators
from stratagem.worker.user_code.entrypoints import EntryPoints, user_code

# ---- Batch order ----

_BLOCK: Final = 256
"""Number of batches that are cut at once; one at a time would cost 8 µs per step."""
_NUM_KEPT: Final = 2
"""Number of cached blocks and orders: batches are read ahead while steps use the previous block."""


EpochRows = Callable[[int], Tensor | list[Tensor]]
"""Returns the rows of an epoch in order, or its batches."""


class BatchOrder:
    """Batches of `num_rows` rows, shuffled again in each epoch with seed + epoch.

    epoch_rows: another order, whose epochs must all have the same number of batches.
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
        """Return (epoch, row numbers) of the batch after `step` applied steps."""
        epoch, position = divmod(step, self.steps_per_epoch)
        number, place = divmod(position, _BLOCK)
        batches = self._blocks.get((epoch, number))
        if batches is None:
            batches = self._blocks[epoch, number] = self._cut(epoch, number)
            if len(self._blocks) > _NUM_KEPT:
                self._blocks.popitem(last=False)
        return epoch, batches[place]

    def _cut(self, epoch: int, number: int) -> Sequence[Tensor]:
        """Cut the row numbers of one block of batches."""
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
    """Batches of a stream's rows, numbered without end: its shards may be in different epochs."""

    steps_per_epoch: Final = 1

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def batch(self, step: int) -> tuple[int, Tensor]:
        """Return (0, row numbers) of the batch after `step` applied steps."""
        return 0, torch.arange(step * self.batch_size, (step + 1) * self.batch_size)


def epoch_order(num_rows: int, seed: int) -> Tensor:
    """Return a permutation of all rows as the order of one epoch."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))


# ---- Row order ----
#
# An order is a pure function of the epoch: the numbers of the training rows, or their batches.

MAX_WEIGHTED_ROWS: Final = 1 << 24
"""Maximum number of weighted rows: the limit of torch.multinomial."""
_WINDOW: Final = 100
"""Default number of batches in a window, inside which rows are sorted by length."""


def epoch_rows_of(
    job: JobSpec, data: Mapping[str, Dataset], entrypoints: EntryPoints
) -> EpochRows | None:
    """Return the order of rows that a job names; None if rows are shuffled."""
    spec = job.data.order
    if spec is None or spec.by == "shuffle" or "train" not in data or job.only_evaluates:
        return None
    dataset = data["train"]
    num_rows = len(dataset)
    if spec.by == "sequential":
        return lambda _: torch.arange(num_rows)
    if spec.weights is not None:
        weights = _numbers(dataset, entrypoints, spec.weights, "weights")
        return partial(_weighted, weights, spec.num_rows or num_rows, job.seed, dataset)
    if spec.lengths is not None:
        lengths = _numbers(dataset, entrypoints, spec.lengths, "lengths")
        return partial(_bucketed, lengths, spec.window or _WINDOW, job.batch_size, job.seed)
    assert spec.entrypoint is not None
    function = entrypoints.resolve(spec.entrypoint, "data.order.entrypoint")
    return partial(_users, function, dataset, job)


def _weighted(weights: Tensor, num_drawn: int, seed: int, dataset: Dataset, epoch: int) -> Tensor:
    """Return rows drawn with replacement by their weights."""
    generator = torch.Generator().manual_seed(seed + epoch)
    drawn = torch.multinomial(weights, num_drawn, replacement=True, generator=generator)
    return _numbered(drawn, dataset)


def _numbered(rows: Tensor, dataset: Dataset) -> Tensor:
    """Add num_rows to a row's number for each earlier occurrence in the epoch, so that its random
    numbers differ; only for rows fetched one by one."""
    if not isinstance(dataset, RowDataset):
        return rows
    ordered, places = torch.sort(rows, stable=True)
    occurrences = torch.empty_like(rows)
    occurrences[places] = torch.arange(len(rows)) - torch.searchsorted(ordered, ordered)
    return rows + len(dataset) * occurrences


def _bucketed(lengths: Tensor, window: int, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
    """Return batches of rows of similar length: shuffled rows are sorted in windows of `window`
    batches and cut, and the batches are shuffled."""
    generator = torch.Generator().manual_seed(seed + epoch)
    rows = torch.randperm(len(lengths), generator=generator)
    batches: list[Tensor] = []
    for part in torch.split(rows, window * batch_size):
        by_length = part[torch.sort(lengths[part], stable=True).indices]
        batches += torch.split(by_length, batch_size)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _users(
    function: Callable[..., Any], dataset: Dataset, job: JobSpec, epoch: int
) -> Tensor | list[Tensor]:
    """Call the user's function with (data set, epoch), twice, and return its result. Raises
    InvalidInputError if the results differ."""
    first, second = (_call_for_order(function, dataset, job.seed, epoch) for _ in range(2))
    if first != second:
        raise InvalidInputError.at(
            "data.order.entrypoint",
            f"gives another order for epoch {epoch} when it is asked again; draw from random, "
            "numpy.random or torch's default generator, which are seeded for each epoch",
        )
    batches = [entry if isinstance(entry, list) else [entry] for entry in first]
    sizes = [len(batch) for batch in batches]
    rows = torch.tensor([row for batch in batches for row in batch], dtype=torch.int64)
    num_rows, is_cut = len(dataset), any(isinstance(entry, list) for entry in first)
    if bool(((rows < 0) | (rows >= num_rows)).any()):
        raise InvalidInputError.at(
            "data.order.entrypoint", f"names rows that are not in 0..{num_rows - 1}"
        )
    if is_cut and not all(1 <= size <= job.batch_size for size in sizes):
        raise InvalidInputError.at(
            "data.order.entrypoint",
            f"gives batches of {min(sizes)} to {max(sizes)} rows; 1 to batch_size "
            f"({job.batch_size}) are allowed",
        )
    numbered = _numbered(rows, dataset)
    return list(torch.split(numbered, sizes)) if is_cut else numbered


def _call_for_order(
    function: Callable[..., Any], dataset: Dataset, seed: int, epoch: int
) -> list[int | list[int]]:
    with generators_kept(), user_code(f"ordering the rows of epoch {epoch}"):
        seed_generators(mix(seed, "order", epoch))
        order = function(_as_given(dataset), epoch)
        if isinstance(order, DistributedSampler):
            raise InvalidInputError.at(
                "data.order.entrypoint",
                "gives a DistributedSampler; batches are cut into shards here, so give the order "
                "of all rows",
            )
        if hasattr(order, "set_epoch"):
            order.set_epoch(epoch)
        return [_whole(entry) for entry in order]


def _whole(value: Any) -> int | list[int]:
    """Return a row number, or a batch of them, as integers."""
    if isinstance(value, Tensor):
        value = value.tolist()
    return [int(row) for row in value] if isinstance(value, Iterable) else int(value)


def _numbers(dataset: Dataset, entrypoints: EntryPoints, name: str, key: str) -> Tensor:
    """Return one number per row from the user's function."""
    function = entrypoints.resolve(name, f"data.order.{key}")
    with user_code(f"computing data.order.{key}"):
        numbers = torch.as_tensor(function(_as_given(dataset)), dtype=torch.float64).reshape(-1)
    is_usable = bool((numbers.isfinite() & (numbers >= 0)).all()) and float(numbers.sum()) > 0
    if len(numbers) != len(dataset) or not is_usable:
        raise InvalidInputError.at(
            f"data.order.{key}",
            f"must give one number >= 0 for each of {len(dataset)} rows, not all 0; "
            f"gave {len(numbers)}",
        )
    if key == "weights" and len(numbers) > MAX_WEIGHTED_ROWS:
        raise InvalidInputError.at(
            "data.order.by", f"weighted takes at most {MAX_WEIGHTED_ROWS} rows, not {len(numbers)}"
        )
    return numbers


def _as_given(dataset: Dataset) -> Any:
    """Return the object that the user's data function returned, without the wrapper around it."""
    match dataset:
        case RowDataset():
            return dataset.source
        case TensorDataset():
            return dataset.x, dataset.y
        case _:
            return dataset
