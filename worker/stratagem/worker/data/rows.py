"""Collate batches from data sets whose rows are fetched one by one, as torch's `Dataset` is.

The generators are seeded for each row and each batch with separate keys, so a row is the same in
every process and every batch.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.numerics.keys import POSITIVE, Key, mix, mix_on
from stratagem.worker.user_code.entrypoints import user_code

# ---- Row data sets ----

Collate = Callable[[list[Any]], Any]
"""Makes a batch from a list of rows."""

_OTHERS_TAKE: Final = frozenset({"datasets"})
"""Packages whose data sets have a method `take` with another meaning."""


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """Keys of the random numbers for fetching each row of a batch, and for collating the batch."""

    rows: Key = ("row",)
    """Key of a row, extended by its number and its number of earlier occurrences in the epoch."""
    batch: Key = ()
    """Key of the random numbers that are drawn while the rows are collated."""


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """All values that determine a batch, besides the job's data."""

    split: str
    num_rows: int
    """The number of rows of the split."""
    given: tuple[tuple[str, int], ...]
    """Arguments of the data function besides the job's keywords."""
    numbers: tuple[int, ...]
    """Row numbers, plus `num_rows` for each earlier occurrence in the epoch."""
    keys: BatchKeys


@dataclass(frozen=True, slots=True)
class RowDataset:
    """Data set of an object with `len()` and `[row]`, with the function that collates its rows."""

    source: Any
    split: str
    num_rows: int
    collate: Collate
    given: tuple[tuple[str, int], ...] = ()

    def __len__(self) -> int:
        return self.num_rows

    def row(self, number: int, keys: BatchKeys, occurrence: int = 0) -> Any:
        """Fetch one row after seeding the generators for it; their states are not restored."""
        return self._row(number, mix(*keys.rows), occurrence)

    def _row(self, number: int, key: int, occurrence: int) -> Any:
        seed_generators(mix_on(key, number, occurrence))
        with user_code(f"fetching row {number} of data.{self.split}"):
            row = self.source[number]
        # Of a memory map, rows may be read-only views, which torch warns of.
        return np.array(row) if isinstance(row, np.ndarray) else row

    def order(self, indices: Tensor, keys: BatchKeys) -> ReadOrder:
        """Return a `ReadOrder`, which describes the batch of these rows completely."""
        return ReadOrder(self.split, self.num_rows, self.given, tuple(indices.tolist()), keys)

    def read(self, order: ReadOrder) -> tuple[Any, Any]:
        """Return (x, y) of an order's rows; the states of all generators are restored.

        A pair is input and target; any other batch is both at once. Rows are computed by one
        thread, so that their bits do not depend on the worker's number of threads.
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
        """Fetch rows that may draw random numbers, each with its key."""
        key = mix(*order.keys.rows)
        return [self._row(n % self.num_rows, key, n // self.num_rows) for n in order.numbers]

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        """Return what `read` returns, for a caller without a key."""
        return self.read(self.order(indices, BatchKeys()))

    def labels(self) -> Tensor:
        """Return the target of every row, for partitioning by label."""
        key = mix("row", "labels")
        with generators_kept():
            rows = (self._row(number, key, 0) for number in range(self.num_rows))
            labels = [row[1] if _is_pair(row) else None for row in rows]
        if any(label is None for label in labels):
            raise InvalidInputError.at(
                f"data.{self.split}", "has rows that are no pairs (input, label)"
            )
        return torch.as_tensor(labels)


def collated(rows: list[Any], collate: Collate, keys: BatchKeys, split: str) -> tuple[Any, Any]:
    """Return (x, y) of rows that have been fetched, with the generators seeded for the batch."""
    seed_generators(mix("collate", *keys.batch))
    return _collated(rows, collate, split)


def _collated(rows: list[Any], collate: Collate, split: str) -> tuple[Any, Any]:
    with user_code(f"collating rows of data.{split}"):
        batch = collate(rows)
        return (batch[0], batch[1]) if _is_pair(batch) else (batch, batch)


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def refuse_loaders(value: object, split: str) -> None:
    """Raise InvalidInputError for objects that select rows themselves, such as loaders."""
    if isinstance(value, DataLoader):
        raise InvalidInputError.at(
            f"data.{split}",
            "is a DataLoader; give its dataset: its collate_fn is data.collate, its batch_size "
            "the job's",
        )


def has_foreign_take(value: object) -> bool:
    """Return whether an object has a `take` with another meaning than that of our data sets."""
    packages = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return isinstance(value, np.ndarray | Tensor) or bool(packages & _OTHERS_TAKE)


def row_dataset(
    value: Any, split: str, collate: Collate | None, given: Mapping[str, int]
) -> RowDataset | None:
    """Make the data set of an object with `len()` and `[row]`; None for any other object."""
    kind = type(value)
    if isinstance(value, str | bytes | Mapping | tuple) or not hasattr(kind, "__getitem__"):
        return None
    if not hasattr(kind, "__len__"):
        raise InvalidInputError.at(f"data.{split}", f"is a {kind.__name__}, which has no len()")
    with user_code(f"asking for the number of rows of data.{split}"):
        num_rows = len(value)
    return RowDataset(value, split, num_rows, collate or default_collate, tuple(given.items()))


# ---- Rows that draw no random numbers ----
#
# Lists, arrays and the plain data sets of torch have such rows, as only their code runs. A reader
# of such rows need not seed the generators, which takes as long as fetching them. A row of a user's
# class may read a generator without a trace in its state, as `torch.initial_seed()` does, so a use
# of a generator cannot be detected afterwards.

_ARRAYS: Final = frozenset({Tensor, np.ndarray, np.memmap})
_LEAVES: Final = _ARRAYS | {int, float, bool, str, bytes, np.float32, np.float64, np.int64}
_COLLATES: Final = dict(default_collate_fn_map)
"""torch's functions of `default_collate` by type, before anybody changes them."""


def rows_without_draws(source: Any, numbers: Sequence[int]) -> list[Any] | None:
    """Return these rows; None if fetching them runs the user's code, or fails."""
    if not _is_plain(source):
        return None
    try:
        rows = [source[number] for number in numbers]
    except Exception:  # fetching them one by one will name the row
        return None
    # Of a memory map, rows may be read-only views, which torch warns of.
    return [np.array(row) if isinstance(row, np.ndarray) else row for row in rows]


def draws_nothing(collate: Callable[[list[Any]], Any], rows: list[Any]) -> bool:
    """Return whether these rows are collated by torch's code alone."""
    is_torchs = collate is default_collate and default_collate_fn_map == _COLLATES
    return is_torchs and _are_values(rows)


def _is_plain(source: Any) -> bool:
    """Return whether `source[number]` surely runs no code but Python's, numpy's and torch's."""
    kind = type(source)
    if kind is TensorDataset:
        return all(type(tensor) is Tensor for tensor in source.tensors)
    if kind is Subset:
        return type(source.indices) in (list, range) and _is_plain(source.dataset)
    if kind is ConcatDataset:
        return all(map(_is_plain, source.datasets))
    return kind is list or kind in _ARRAYS


def _are_values(values: list[Any]) -> bool:
    """Return whether all are arrays, numbers and strings, in lists, tuples and str-keyed dicts."""
    nested = set(map(type, values)) - _LEAVES
    if not nested:
        return True
    if not nested <= {dict, list, tuple}:
        return False
    dicts = [value for value in values if type(value) is dict] if dict in nested else []
    others = [value for value in values if type(value) in (list, tuple)] if nested != {dict} else []
    inner = chain(chain.from_iterable(map(dict.values, dicts)), chain.from_iterable(others))
    keys: set[Any] = set().union(*dicts)
    return all(type(key) is str for key in keys) and _are_values(list(inner))


# ---- Random generators ----
#
# The user's code draws from the generators of Python and numpy and torch's default one on the CPU.


def seed_users_generators(key: int) -> None:
    """Seed the generators of Python and numpy, which only the user's code uses. key: 64 bits."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


def seed_generators(key: int) -> None:
    """Seed all generators that the user's code may use."""
    seed_users_generators(key)
    torch.default_generator.manual_seed(key & POSITIVE)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Context manager that restores all generators at its end."""
    python, numpy = random.getstate(), np.random.get_state()
    of_torch = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(of_torch)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager inside which torch computes with one thread, in this thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
