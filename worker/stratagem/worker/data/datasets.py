"""Data sets give rows by number, and `Gather` copies their rows for a computation.

Rows are always copied into storage that torch allocated, never views, because the bits of a matrix
product depend on the alignment of its operands. The module knows neither the origin of a data set
nor which rows are needed.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.schema.json import FrozenDict
from stratagem.worker.data.rows import (
    BatchKeys,
    Collate,
    ReadOrder,
    RowDataset,
    generators_kept,
    has_foreign_take,
    refuse_loaders,
    row_dataset,
    seed_generators,
)
from stratagem.worker.data.stream_reader import stream_source
from stratagem.worker.data.streams import FetchedRows, StreamDataset, StreamedSplit
from stratagem.worker.user_code.entrypoints import user_code

# ---- Data sets and gathering ----

# torch aligns its own CPU allocations to this many bytes.
_ALIGNMENT_BYTES: Final = 64
_NO_KEYS: Final = BatchKeys()


@runtime_checkable
class Dataset(Protocol):
    """Interface of data sets. `take` gets int64 row numbers on the CPU and returns (x, y)."""

    def __len__(self) -> int: ...

    def take(self, indices: Tensor) -> tuple[Any, Any]: ...


@dataclass(frozen=True, slots=True)
class TensorDataset:
    """Data set of (nested) tensors whose first dimension counts rows. y may be None."""

    x: Any
    y: Any
    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        def rows(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, indices if tensor.is_cpu else indices.to(tensor.device))

        return map_tensors(self.x, rows), map_tensors(self.y, rows)


@dataclass(frozen=True, slots=True)
class Subset:
    """The rows of another data set that one federated client may use."""

    base: Dataset
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Tensor) -> tuple[Any, Any]:
        return self.base.take(self.rows.index_select(0, indices))


def training_split(data: Mapping[str, Dataset]) -> Dataset:
    """Return the training split. Raises InvalidInputError if there is none."""
    if "train" not in data:
        splits = ", ".join(data) or "none"
        raise InvalidInputError.at("data", f'has no split "train"; it has: {splits}')
    return data["train"]


def at_the_base(dataset: Dataset, indices: Tensor) -> tuple[Dataset, Tensor]:
    """Return the data set below all subsets, and the numbers of these rows in it."""
    while isinstance(dataset, Subset):
        indices = dataset.rows.index_select(0, indices)
        dataset = dataset.base
    return dataset, indices


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor (or array) in a nesting of tuples, lists and dicts.

    Returns the same nesting. Raises InvalidInputError for any other kind of value.
    """
    match value:
        case Tensor():
            return change(value)
        case np.ndarray():
            return change(torch.from_numpy(value))
        case tuple() | list():
            made = [map_tensors(item, change) for item in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
        case Mapping():
            return {key: map_tensors(item, change) for key, item in value.items()}
        case None:
            return None
        case _:
            kind = type(value).__name__
            raise InvalidInputError.at(
                "data", f"holds a {kind}; tensors and tuples, lists and dicts of them are allowed"
            )


def as_dataset(
    value: object,
    split: str,
    collate: Collate | None = None,
    given: Mapping[str, int] = FrozenDict(),
) -> Dataset:
    """Check and convert a data set that the user's code has returned.

    collate: makes a batch of rows that are fetched one by one. given: the arguments that the
    function which made it got besides the job's keywords.
    """
    refuse_loaders(value, split)
    if isinstance(value, tuple) and len(value) in (1, 2):
        return tensor_dataset(value[0], value[1] if len(value) == 2 else None, split)
    if isinstance(value, Dataset) and not has_foreign_take(value):
        return value
    source = stream_source(value, split)
    if source is not None:
        return StreamedSplit(source, split, collate or default_collate)
    rows = row_dataset(value, split, collate, given)
    if rows is not None:
        return rows
    raise InvalidInputError.at(
        f"data.{split}",
        f"is a {type(value).__name__}; allowed are a tuple (x, y) of tensors, an object with "
        "len() and [row], one with len() and take(indices) -> (x, y), and a stream of rows",
    )


def tensor_dataset(x: Any, y: Any, split: str) -> TensorDataset:
    """Make a data set of whole tensors, which must all have the same number of rows."""
    lengths: set[int] = set()

    def check(tensor: Tensor) -> Tensor:
        lengths.add(tensor.shape[0] if tensor.dim() else -1)
        return tensor

    x, y = map_tensors(x, check), map_tensors(y, check)
    if len(lengths) != 1 or -1 in lengths:
        raise InvalidInputError.at(
            f"data.{split}", f"tensors must have the same number of rows, not {sorted(lengths)}"
        )
    return TensorDataset(x, y, lengths.pop())


class Readers(Protocol):
    """Interface of processes that fetch and collate rows ahead of their use."""

    def batch(self, dataset: RowDataset, order: ReadOrder) -> tuple[Any, Any]:
        """Return the batch that this `ReadOrder` describes, the same as `dataset.read(order)`."""

    def expect(self, coming: Iterator[ReadOrder]) -> None:
        """Read these batches ahead, instead of those expected before."""


Coming = tuple[Dataset, Tensor, BatchKeys]
"""The arguments of a future call of `Gather`, for which rows are read ahead."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Copies rows of data sets to one device. dtype: the type of floats; None keeps that of the
    data. pool: reuses the storage of batches. cache: data sets on the device. readers: processes
    that read row data sets."""

    dtype: torch.dtype | None
    device: torch.device
    pool: "BatchPool | None" = field(default=None, kw_only=True)
    cache: "DatasetCache | None" = field(default=None, kw_only=True)
    readers: Readers | None = field(default=None, kw_only=True)

    def expect(self, coming: Iterable[Coming]) -> None:
        """Announce the next batches, which are read ahead if there are readers."""
        if self.readers is not None:
            bases = ((*at_the_base(dataset, rows), keys) for dataset, rows, keys in coming)
            self.readers.expect(
                base.order(numbers, keys)
                for base, numbers, keys in bases
                if isinstance(base, RowDataset)
            )

    def __call__(
        self, dataset: Dataset, indices: Tensor, activity: str, keys: BatchKeys = _NO_KEYS
    ) -> tuple[Any, Any]:
        """Return (x, y) of these rows in new storage. keys: the keys of the random numbers of the
        rows and the batch, if rows are fetched one by one."""
        with user_code(activity):
            if self.cache is not None:
                dataset = self.cache.of(dataset, self)
            return self.take(dataset, indices, keys)

    def take(
        self, dataset: Dataset, indices: Tensor, keys: BatchKeys = _NO_KEYS
    ) -> tuple[Any, Any]:
        """Return (x, y) from the data set's own `take`, on the device."""
        base, numbers = at_the_base(dataset, indices)
        if isinstance(base, RowDataset | StreamDataset | FetchedRows):
            x, y = self._read(base, numbers, keys)
            placed = map_tensors(x, self.place)
            return placed, placed if y is x else map_tensors(y, self.place)
        if self.pool is not None and isinstance(base, TensorDataset):
            return self._pooled(base.x, numbers), self._pooled(base.y, numbers)
        pair = base.take(numbers)
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise TypeError(f"take() must return (x, y), not a {type(pair).__name__}")
        return map_tensors(pair[0], self.place), map_tensors(pair[1], self.place)

    def _read(
        self, base: RowDataset | StreamDataset | FetchedRows, numbers: Tensor, keys: BatchKeys
    ) -> tuple[Any, Any]:
        """Return (x, y) of rows that are fetched one by one."""
        if not isinstance(base, RowDataset):
            return base.batch(numbers, keys)
        order = base.order(numbers, keys)
        return base.read(order) if self.readers is None else self.readers.batch(base, order)

    def _pooled(self, value: Any, indices: Tensor) -> Any:
        pool = self.pool
        assert pool is not None
        return map_tensors(
            value,
            lambda t: pool.rows(t, indices.to(t.device), self._dtype_of(t), self.device),
        )

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        if self.dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        return self.dtype

    def place(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device and with the dtype of the computation."""
        dtype = self._dtype_of(tensor)
        if self.pool is not None:
            return self.pool.place(tensor, dtype, self.device)
        placed = tensor.detach() if tensor.requires_grad else tensor
        if placed.dtype != dtype or placed.device != self.device:
            placed = placed.to(self.device, dtype)
        placed = placed.contiguous()
        return placed.clone() if placed.data_ptr() % _ALIGNMENT_BYTES else placed


# ---- Storage of batches and data sets ----
#
# This is the part of `execution.memory` that concerns data. Pooled stores batches in buffers that
# are reused, page-locked on the host for a CUDA device. Cached reads data sets once and keeps them
# on the device. Neither changes a value.

_IN_USE_BY_US: Final = 2
"""Number of references to a buffer's storage from this module."""
_CHUNK_ROWS: Final = 256
_MAX_CACHED: Final = 64
"""Maximum number of cached data sets; each federated client may have its own."""


class BatchPool:
    """Buffers that are reused once no other tensor refers to their storage."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def rows(
        self, tensor: Tensor, indices: Tensor, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return tensor[indices]; indices are int64 on the tensor's device."""
        shape = torch.Size([len(indices), *tensor.shape[1:]])
        selected = self._empty(shape, tensor.dtype, tensor.device)
        torch.index_select(tensor.detach(), 0, indices, out=selected)
        is_there = selected.dtype == dtype and selected.device == device
        return selected if is_there else self._empty(shape, dtype, device).copy_(selected)

    def place(self, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a copy of the tensor with this dtype on this device."""
        tensor = tensor.detach()
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = self._empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
        return self._empty(tensor.shape, dtype, device).copy_(tensor)

    def _empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = shape.numel()
        for buffer in self._buffers:
            fits = buffer.dtype == dtype and buffer.device == device and buffer.numel() >= numel
            if fits and _is_idle(buffer):
                return buffer.detach()[:numel].view(shape)
        is_pinned = device.type == "cpu" and torch.cuda.is_available()
        made = torch.empty(max(1, numel), dtype=dtype, device=device, pin_memory=is_pinned)
        self._buffers = [
            storage
            for storage in self._buffers
            if (storage.dtype, storage.device) != (dtype, device) or not _is_idle(storage)
        ]
        self._buffers.append(made)
        return made.detach()[:numel].view(shape)


def _is_idle(buffer: Tensor) -> bool:
    storage = buffer.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) <= _IN_USE_BY_US


class DatasetCache:
    """Data sets as tensors on the device in the computation's dtype, converted at first use."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, tuple[Dataset, TensorDataset]] = OrderedDict()

    def of(self, dataset: Dataset, gather: Gather) -> Dataset:
        """Return the cached form of a data set; random rows are drawn once, alike everywhere."""
        if isinstance(dataset, Subset):
            return Subset(self.of(dataset.base, gather), dataset.rows)
        key = id(dataset)
        if key not in self._made:
            self._made[key] = (dataset, _read(dataset, gather))
            if len(self._made) > _MAX_CACHED:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key][1]


def _read(dataset: Dataset, gather: Gather) -> TensorDataset:
    if isinstance(dataset, TensorDataset):
        x, y = map_tensors(dataset.x, gather.place), map_tensors(dataset.y, gather.place)
        return TensorDataset(x, y, dataset.num_rows)
    num_rows = len(dataset)
    parts = []
    for start in range(0, max(1, num_rows), _CHUNK_ROWS):
        with generators_kept():
            seed_generators(start)
            parts.append(
                gather.take(dataset, torch.arange(start, min(num_rows, start + _CHUNK_ROWS)))
            )
    x, y = _joined([x for x, _ in parts]), _joined([y for _, y in parts])

    def check(tensor: Tensor) -> Tensor:
        if tensor.shape[:1] != (num_rows,):
            raise InvalidInputError.at(
                "execution.memory",
                f"Cached needs one row per index; take() gave {tensor.shape[0]} for {num_rows}",
            )
        return tensor

    return TensorDataset(map_tensors(x, check), map_tensors(y, check), num_rows)


def _joined(parts: list[Any]) -> Any:
    """Concatenate nested tensors along their rows."""
    match parts[0]:
        case Tensor():
            return torch.cat(parts)
        case dict() as first:
            return {key: _joined([part[key] for part in parts]) for key in first}
        case tuple() | list() as first:
            return type(first)(_joined(list(column)) for column in zip(*parts, strict=True))
        case _:
            return None
