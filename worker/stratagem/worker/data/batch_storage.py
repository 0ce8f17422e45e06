"""Storage of batches and data sets: the part of `execution.memory` that concerns data.

Pooled: batches are stored in buffers that are reused, page-locked on the host for a CUDA device.
Cached: data sets are read once and kept on the device. Neither changes a value. Must not know
models.
"""

from collections import OrderedDict
from typing import Any, Final

import torch
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.data.datasets import Dataset, Gather, Subset, TensorDataset, map_tensors
from stratagem.worker.data.generators import generators_kept, seed_generators

_IN_USE_BY_US: Final = 2
"""References to a buffer's storage that we hold while we look at it."""
_CHUNK_ROWS: Final = 256
_MAX_CACHED: Final = 64
"""Data sets; each federated client may have its own."""


class BatchPool:
    """Buffers that are reused once no other tensor refers to their storage."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def rows(
        self, tensor: Tensor, indices: Tensor, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Returns tensor[indices]; indices are int64 on the tensor's device."""
        shape = torch.Size([len(indices), *tensor.shape[1:]])
        taken = self._empty(shape, tensor.dtype, tensor.device)
        torch.index_select(tensor.detach(), 0, indices, out=taken)
        is_there = taken.dtype == dtype and taken.device == device
        return taken if is_there else self._empty(shape, dtype, device).copy_(taken)

    def place(self, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a copy of the tensor with this dtype on this device."""
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
    """Data sets as tensors of the computation's dtype on its device, made when first used."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, tuple[Dataset, TensorDataset]] = OrderedDict()

    def of(self, dataset: Dataset, gather: Gather) -> Dataset:
        """Returns the cached form of a data set, with the same rows.

        What a data set draws at random is drawn once, alike on all workers.
        """
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
    """Joins the nested tensors of chunks along their rows."""
    match parts[0]:
        case Tensor():
            return torch.cat(parts)
        case dict() as first:
            return {key: _joined([part[key] for part in parts]) for key in first}
        case tuple() | list() as first:
            return type(first)(_joined(list(column)) for column in zip(*parts, strict=True))
        case _:
            return None
