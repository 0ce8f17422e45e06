"""Transfer batches between a reader process and its worker: their layout, memory and messages.

A batch is tensors in tuples, lists, named tuples and dicts. It travels as a run of bytes and a JSON
description of the place of each tensor.
"""

import collections
import json
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from stratagem.common.base.errors import (
    InvalidInputError,
    StratagemError,
    UserCodeError,
    Violation,
)
from stratagem.common.schema.json import JSON
from stratagem.worker.data.factory import DataFunction
from stratagem.worker.data.rows import BatchKeys, ReadOrder
from stratagem.worker.user_code.entrypoints import EntryPoints

# ---- Layout of a batch ----

_ALIGNMENT_BYTES: Final = 64
"""Alignment of torch's allocations; the bits of a matrix product depend on alignment."""


@dataclass(slots=True)
class Layout:
    """The tensors of a batch and their places in memory, in the order they are found."""

    tensors: list[tuple[int, Tensor]] = field(default_factory=list)
    size: int = 0
    """The total number of bytes."""

    def describe(self, value: Any) -> JSON:
        """Return the JSON description of nested tensors, and assign a place to each tensor."""
        match value:
            case None:
                return None
            case Tensor():
                return self._place(value)
            case dict():
                pairs: list[JSON] = [
                    [_key(key), self.describe(item)] for key, item in value.items()
                ]
                return {"pairs": pairs}
            case _:
                kind, items = type(value), [self.describe(item) for item in value]
                if kind in (tuple, list):
                    return {kind.__name__: items}
                names = list(getattr(kind, "_fields", ()))
                is_list = isinstance(value, list)
                path: list[JSON] = [kind.__module__, kind.__qualname__]
                return {"items": items, "class": path, "names": names, "is_list": is_list}

    def _place(self, tensor: Tensor) -> JSON:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise TypeError(f"a {tensor.layout} tensor cannot come from a reader; give a dense one")
        offset = self.size
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.tensors.append((offset, tensor.detach()))
        num_bytes = tensor.numel() * tensor.element_size()
        self.size += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return {"tensor": dtype, "shape": list(tensor.shape), "at": offset}

    def write(self, memory: Tensor) -> None:
        """Copy the tensors to their places in a tensor of bytes."""
        for offset, tensor in self.tensors:
            view(memory, offset, tensor.dtype, tensor.shape).copy_(tensor)


def view(memory: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return the tensor at this byte offset of the memory; an empty tensor is newly made."""
    num_bytes = shape.numel() * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return memory[offset : offset + num_bytes].view(dtype).view(shape)


def rebuild(tree: Any, memory: Tensor) -> Any:
    """Decode a batch from its description; the tensors are views of the memory."""
    match tree:
        case None:
            return None
        case {"tensor": name, "shape": shape, "at": offset}:
            return view(memory, offset, getattr(torch, name), torch.Size(shape))
        case {"pairs": pairs}:
            return {_as_key(key): rebuild(item, memory) for key, item in pairs}
        case {"tuple": items}:
            return tuple(rebuild(item, memory) for item in items)
        case {"list": items}:
            return [rebuild(item, memory) for item in items]
        case {"items": items, "class": [module, name], "names": names, "is_list": is_list}:
            made = _maker(module, name, tuple(names), is_list)
            return made([rebuild(item, memory) for item in items])
        case _:
            raise TypeError(f"{tree!r} describes no batch")


def _key(key: object) -> JSON:
    match key:
        case str() | bool() | int() | float() | None:
            return key
        case tuple():
            return [_key(part) for part in key]
        case _:
            raise TypeError(f"a batch has the key {key!r}; text, numbers and tuples are allowed")


def _as_key(key: Any) -> Any:
    return tuple(_as_key(part) for part in key) if isinstance(key, list) else key


def _named_tuple(name: str, names: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, names)


@lru_cache(maxsize=256)
def _maker(
    module: str, name: str, names: tuple[str, ...], is_list: bool
) -> Callable[[list[Any]], Any]:
    """Return a function that makes this tuple or list class from its items; a similar class if this
    process has not loaded it."""
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if names:
        is_it = isinstance(kind, type) and getattr(kind, "_fields", None) == names
        alike = kind if is_it else _named_tuple(name.rpartition(".")[2], names)
        return lambda items: alike(*items)
    plain = list if is_list else tuple
    return kind if isinstance(kind, type) and issubclass(kind, plain) else plain


# ---- Shared memory of a reader ----
#
# A reader writes batches to segments without a name, and its worker maps them. A segment holds one
# batch and is written again once the worker has released that batch. There are as many segments as
# batches in use at once; one that is too small is replaced.

_SPARE: Final = 8
"""Divisor of a new segment's spare room: it has 1 / this more than needed, as batches differ."""


@dataclass(frozen=True, slots=True)
class BatchSegment:
    """A numbered piece of shared memory for batches."""

    number: int
    memory: Tensor
    """The segment's memory, as a tensor of bytes."""


class WrittenSegments:
    """The shared-memory segments of a reader, as the reader process itself writes them."""

    def __init__(self) -> None:
        self._free: list[BatchSegment] = []
        self._used: dict[int, BatchSegment] = {}

    def take(self, size: int) -> tuple[BatchSegment, int | None]:
        """Return a segment of at least `size` bytes and, if it is new, its file, which the caller
        closes. A new one may reuse the number of a smaller one."""
        segment = self._free.pop() if self._free else None
        if segment is not None and segment.memory.shape[0] >= size:
            self._used[segment.number] = segment
            return segment, None
        number = len(self._used) if segment is None else segment.number
        fd = _file(size + size // _SPARE)
        made = self._used[number] = BatchSegment(number, torch.from_numpy(_mapped(fd)))
        return made, fd

    def free(self, number: int) -> None:
        """Note that a segment may be written again."""
        self._free.append(self._used.pop(number))


class MappedSegments:
    """The shared-memory segments of a reader, as its worker process reads them."""

    def __init__(self) -> None:
        self._mapped: dict[int, np.ndarray] = {}

    def map(self, number: int, fd: int) -> None:
        """Map a segment in place of an earlier one with the same number, and close the file."""
        try:
            self._mapped[number] = _mapped(fd)
        finally:
            os.close(fd)

    def view(self, number: int, forgotten: Callable[[int], object]) -> Tensor:
        """Return the bytes of a segment. forgotten: called with the number, by any thread, once no
        tensor refers to them."""
        seen = self._mapped[number][:]
        weakref.finalize(seen, forgotten, number).atexit = False
        return torch.from_numpy(seen)


def _file(size: int) -> int:
    """Make an in-memory file, fully allocated: a lack of memory later would kill the process."""
    fd = os.memfd_create("stratagem-batch", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    except OSError:
        os.close(fd)
        raise
    return fd


def _mapped(fd: int) -> np.ndarray:
    size = os.fstat(fd).st_size
    mapped = mmap.mmap(fd, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return np.frombuffer(mapped, dtype=np.uint8)


# ---- Messages of a reader ----
#
# Messages are lines of JSON. A worker sends a setup, then orders; a reader answers each with a
# batch or an error, in order, and reports the output of the user's code.


@dataclass(frozen=True, slots=True)
class ReaderSetup:
    """The values from which a reader makes the same data set as its worker."""

    function: DataFunction
    seed: int
    entrypoints: EntryPoints

    def text(self, sys_path: Sequence[str]) -> str:
        """Encode the setup as the first message. sys_path: the worker's path for imports."""
        return json.dumps(
            {
                "sys_path": list(sys_path),
                "allow": list(self.entrypoints.allow),
                "import_paths": list(map(str, self.entrypoints.import_paths)),
                "code": self.entrypoints.code,
                "entrypoint": self.function.entrypoint,
                "kwargs": self.function.kwargs,
                "collate": self.function.collate,
                "seed": self.seed,
            }
        )


def setup_of(message: Mapping[str, Any]) -> ReaderSetup:
    """Decode the setup from the first message."""
    entrypoints = EntryPoints(message["allow"], message["import_paths"], message["code"])
    function = DataFunction(message["entrypoint"], message["kwargs"], message["collate"])
    return ReaderSetup(function, message["seed"], entrypoints)


def order_text(ticket: int, order: ReadOrder, freed: Sequence[int]) -> str:
    """Encode an order as a message. freed: segments that may be written again."""
    return json.dumps(
        {
            "ticket": ticket,
            "split": order.split,
            "num_rows": order.num_rows,
            "given": order.given,
            "numbers": order.numbers,
            "row_key": order.keys.rows,
            "batch_key": order.keys.batch,
            "freed": freed,
        }
    )


def order_of(message: Mapping[str, Any]) -> ReadOrder:
    """Decode an order from its message."""
    return ReadOrder(
        message["split"],
        message["num_rows"],
        tuple((name, value) for name, value in message["given"]),
        tuple(message["numbers"]),
        BatchKeys(tuple(message["row_key"]), tuple(message["batch_key"])),
    )


def error_text(ticket: int, error: StratagemError) -> str:
    """Encode the answer to a failed order."""
    answer: dict[str, Any] = {"ticket": ticket}
    match error:
        case InvalidInputError(violations=violations) if violations:
            answer["invalid"] = [[violation.field, violation.message] for violation in violations]
        case UserCodeError():
            answer["failed"] = [error.type, error.message, error.traceback, error.activity]
        case _:
            answer["failed"] = [type(error).__name__, str(error), "", ""]
    return json.dumps(answer)


def error_of(message: Mapping[str, Any]) -> StratagemError | None:
    """Decode the error in an answer; None if there is none."""
    if "invalid" in message:
        return InvalidInputError(violations=[Violation(*pair) for pair in message["invalid"]])
    if "failed" in message:
        kind, text, traceback, activity = message["failed"]
        return UserCodeError(kind, text, traceback, activity=activity)
    return None
