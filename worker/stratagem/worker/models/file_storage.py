"""Gives large tensors storage in files while a model is built, so that its size need not fit the
memory: the kernel writes pages out that are not used, as it cannot do with memory of a process
where there is no swap.

What is computed is the same: the same operations run in the same order on the same numbers, drawn
from the same generator; only where the results lie is another place.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from stratagem.common.base.errors import LimitError

SMALLEST_BYTES: Final = 1 << 20
"""Of storage that is a file; smaller tensors are of no account."""
_EMPTY: Final = torch.ops.aten.empty.memory_format


class FileStorage(TorchDispatchMode):
    """While this mode is active, new large CPU tensors of the thread lie in files of a folder.

    The files have no names, and are gone with their tensors, or with the process.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder = folder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _EMPTY and _is_plain(kwargs):
            # Not moved there afterwards, as others are: most of a model begins so.
            meta = func(*args, **{**kwargs, "device": "meta"})
            if meta.untyped_storage().nbytes() >= SMALLEST_BYTES:
                return self._in_file(meta)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if not any(_is_large(each) for each in tree_leaves(result)):
            return result
        # What shares storage with an argument, as views do, has to go on sharing it.
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        moved: dict[int, UntypedStorage] = {}

        def move(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage() if _is_large(tensor) else None
            if storage is None or storage.data_ptr() in given:
                return tensor
            if storage.data_ptr() not in moved:
                moved[storage.data_ptr()] = self._storage(storage.nbytes())
                moved[storage.data_ptr()].copy_(storage)
            return _view(tensor, moved[storage.data_ptr()])

        return tree_map_only(Tensor, move, result)

    def _in_file(self, meta: Tensor) -> Tensor:
        return _view(meta, self._storage(meta.untyped_storage().nbytes()))

    def _storage(self, num_bytes: int) -> UntypedStorage:
        """Return the memory of a new file. Raises LimitError where the disk has no room for it: a
        page that cannot be written later would end the process."""
        try:
            # It never has a name, so a process that is killed leaves nothing behind.
            with TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                path = f"/proc/self/fd/{file.fileno()}"
                storage = UntypedStorage.from_file(path, shared=True, nbytes=num_bytes)
        except OSError as error:
            text = f"{self._folder} has no room for {num_bytes} bytes of a model: {error.strerror}"
            raise LimitError(text) from error
        assert isinstance(storage, UntypedStorage)
        return storage


def _is_plain(kwargs: Mapping[str, Any]) -> bool:
    """Return True for the options of a tensor that has storage on the CPU."""
    device, layout = kwargs.get("device"), kwargs.get("layout")
    is_cpu = device is None or torch.device(device).type == "cpu"
    return is_cpu and layout in (None, torch.strided) and not kwargs.get("pin_memory")


def _is_large(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.untyped_storage().nbytes() >= SMALLEST_BYTES
    )


def _address(tensor: Tensor) -> int:
    """Return where the storage of a tensor begins; 0 for one that has none, as sparse ones."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _view(tensor: Tensor, storage: UntypedStorage) -> Tensor:
    """Return the tensor as it is, but for its storage."""
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
