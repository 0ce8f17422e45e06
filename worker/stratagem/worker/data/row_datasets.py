"""Data sets whose rows are fetched one by one, as torch's `Dataset` is, and collated to batches.

Owns what a row may draw at random: the generators are seeded for each row and each batch with keys
of their own, so a row is the same whoever fetches it, in whichever batch. Must not know where a
data set came from, nor which rows are wanted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.numerics.keys import Key, mix, mix_on
from stratagem.worker.data.generators import generators_kept, one_thread, seed_generators
from stratagem.worker.data.known_rows import draws_nothing, rows_without_draws
from stratagem.worker.user_code.entrypoints import user_code

Collate = Callable[[list[Any]], Any]
"""Makes a batch of a list of rows."""

_OTHERS_TAKE: Final = frozenset({"datasets"})
"""Packages whose data sets have a `take` that means something else than ours."""


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """The keys of what a batch draws at random while it is made."""

    rows: Key = ("row",)
    """Completed by the number of the row, and by how often it came before in the epoch."""
    batch: Key = ()
    """Of collating."""


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """All that a batch is made of, beside the job's data: whoever reads it makes the same."""

    split: str
    num_rows: int
    """Of the split."""
    given: tuple[tuple[str, int], ...]
    """What the function that returns the data got beside the job's keywords."""
    numbers: tuple[int, ...]
    """Of rows, plus `num_rows` for each time that one came before in the epoch."""
    keys: BatchKeys


@dataclass(frozen=True, slots=True)
class RowDataset:
    """An object with `len()` and `[row]`, and the function that makes a batch of its rows."""

    source: Any
    split: str
    num_rows: int
    collate: Collate
    given: tuple[tuple[str, int], ...] = ()

    def __len__(self) -> int:
        return self.num_rows

    def row(self, number: int, keys: BatchKeys, occurrence: int = 0) -> Any:
        """Fetches one row, with the generators seeded for it; they are left as it left them."""
        return self._row(number, mix(*keys.rows), occurrence)

    def _row(self, number: int, key: int, occurrence: int) -> Any:
        seed_generators(mix_on(key, number, occurrence))
        with user_code(f"fetching row {number} of data.{self.split}"):
            row = self.source[number]
        # Of a memory map, rows may be read-only views, which torch warns of.
        return np.array(row) if isinstance(row, np.ndarray) else row

    def order(self, indices: Tensor, keys: BatchKeys) -> ReadOrder:
        """Returns the order of these rows."""
        return ReadOrder(self.split, self.num_rows, self.given, tuple(indices.tolist()), keys)

    def read(self, order: ReadOrder) -> tuple[Any, Any]:
        """Returns (x, y) of an order's rows; all generators stay as they were.

        A batch of two things is input and target; any other one is both at once. Rows are computed
        by one thread, whose bits do not depend on how many the worker has.
        """
        if len(self.source) != self.num_rows:
            raise InvalidInputError.at(
                f"data.{self.split}",
                f"had {self.num_rows} rows when it was loaded and has {len(self.source)} now; "
                "their number must stay",
            )
        with one_thread():
            rows = rows_without_draws(self.source, [n % self.num_rows for n in order.numbers])
            if rows is not None and draws_nothing(self.collate, rows):
                return _collated(rows, self.collate, self.split)
            with generators_kept():
                if rows is None:
                    rows = self._keyed_rows(order)
                return collated(rows, self.collate, order.keys, self.split)

    def _keyed_rows(self, order: ReadOrder) -> list[Any]:
        """Fetches rows that may draw at random, each with a key of its own."""
        key = mix(*order.keys.rows)
        return [self._row(n % self.num_rows, key, n // self.num_rows) for n in order.numbers]

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        """Returns what `read` does, for a use that has no key of its own."""
        return self.read(self.order(indices, BatchKeys()))

    def labels(self) -> Tensor:
        """Returns the target of every row, for a partition by label."""
        key = mix("row", "labels")
        with generators_kept():
            rows = (self._row(number, key, 0) for number in range(self.num_rows))
            found = [row[1] if _is_pair(row) else None for row in rows]
        if any(label is None for label in found):
            raise InvalidInputError.at(
                f"data.{self.split}", "has rows that are no pairs (input, label)"
            )
        return torch.as_tensor(found)


def collated(rows: list[Any], collate: Collate, keys: BatchKeys, split: str) -> tuple[Any, Any]:
    """Returns (x, y) of rows that have been fetched, with the generators seeded for the batch."""
    seed_generators(mix("collate", *keys.batch))
    return _collated(rows, collate, split)


def _collated(rows: list[Any], collate: Collate, split: str) -> tuple[Any, Any]:
    with user_code(f"collating rows of data.{split}"):
        return _pair(collate(rows))


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _pair(batch: Any) -> tuple[Any, Any]:
    return (batch[0], batch[1]) if _is_pair(batch) else (batch, batch)


def refuse_loaders(value: object, split: str) -> None:
    """Refuses what decides itself which rows come next."""
    if isinstance(value, DataLoader):
        raise InvalidInputError.at(
            f"data.{split}",
            "is a DataLoader; give its dataset: its collate_fn is data.collate, its batch_size "
            "the job's",
        )


def has_foreign_take(value: object) -> bool:
    """Returns whether an object's `take` is another function than that of our data sets."""
    packages = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return isinstance(value, np.ndarray | Tensor) or bool(packages & _OTHERS_TAKE)


def row_dataset(
    value: Any, split: str, collate: Collate | None, given: Mapping[str, int]
) -> RowDataset | None:
    """Returns the data set of an object with `len()` and `[row]`; None for any other object."""
    kind = type(value)
    if isinstance(value, str | bytes | Mapping | tuple) or not hasattr(kind, "__getitem__"):
        return None
    if not hasattr(kind, "__len__"):
        raise InvalidInputError.at(f"data.{split}", f"is a {kind.__name__}, which has no len()")
    with user_code(f"asking for the number of rows of data.{split}"):
        num_rows = len(value)
    return RowDataset(value, split, num_rows, collate or default_collate, tuple(given.items()))
