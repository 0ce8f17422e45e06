"""Batches as a run of bytes and a JSON description of what lies where in it.

A batch is tensors in tuples, lists, named tuples and dicts. Must not know where the bytes are kept.
"""

import collections
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from stratagem.common.schema.json import JSON

_ALIGNMENT_BYTES: Final = 64
"""As torch aligns what it allocates: the bits of a matrix product depend on it."""


@dataclass(slots=True)
class Layout:
    """The tensors of a batch with their places, as they are found."""

    tensors: list[tuple[int, Tensor]] = field(default_factory=list)
    size: int = 0
    """Bytes in all."""

    def describe(self, value: Any) -> JSON:
        """Returns the description of a nesting of tensors, which get places here."""
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
        """Copies the tensors to their places in a tensor of bytes."""
        for offset, tensor in self.tensors:
            view(memory, offset, tensor.dtype, tensor.shape).copy_(tensor)


def view(memory: Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Returns the tensor that lies at a place of a tensor of bytes; an empty one lies nowhere."""
    num_bytes = shape.numel() * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    return memory[offset : offset + num_bytes].view(dtype).view(shape)


def rebuild(tree: Any, memory: Tensor) -> Any:
    """Returns the batch of a description; its tensors are views of the memory."""
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
    """The class of this name, if it is loaded here; else one that is like it."""
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if names:
        is_it = isinstance(kind, type) and getattr(kind, "_fields", None) == names
        alike = kind if is_it else _named_tuple(name.rpartition(".")[2], names)
        return lambda items: alike(*items)
    plain = list if is_list else tuple
    return kind if isinstance(kind, type) and issubclass(kind, plain) else plain
