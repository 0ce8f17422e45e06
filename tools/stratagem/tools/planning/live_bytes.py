"""Counts the bytes of tensors from their creation to their end, operation by operation.

Works for real tensors and for fake ones, which have shapes and no memory: with those, whole
training steps can be played through for models far larger than this machine. Sees what tensors
hold; what a kernel needs inside an operation it does not see. Must not know training.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stratagem.tools.planning import cpu_kernel_memory

CUDA_BLOCK_BYTES: Final = 512
"""torch's CUDA allocator gives out multiples of this."""

_READ_VALUE: Final = torch.ops.aten._local_scalar_dense.default


class LiveBytes(TorchDispatchMode):
    """Counts live storages: while it is entered, every storage made on `device` counts until it is
    freed.

    A fake tensor has no values. Where a program reads one (the loss, a norm, a count) it gets 1.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = device.type
        self._block = CUDA_BLOCK_BYTES if device.type == "cuda" else 1
        self._sizes: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self.live = 0
        self.peak = 0
        self.before_backward = 0
        """The most that was live when a backward began."""
        self._is_in_backward = False

    def forget_peak(self) -> None:
        """Restart the peaks from the bytes that are live now."""
        self.peak, self.before_backward = self.live, 0

    def size_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages of these tensors; shared ones count once."""
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in tensors
            if tensor.device.type == self._type
        }
        return sum(map(self._rounded, storages.values()))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _READ_VALUE and isinstance(args[0], FakeTensor):
            return _one_of(args[0].dtype)
        is_in_backward = torch._C._current_graph_task_id() != -1
        if is_in_backward and not self._is_in_backward:
            self.before_backward = max(self.before_backward, self.live)
        self._is_in_backward = is_in_backward
        made = func(*args, **(kwargs or {}))
        if func is cpu_kernel_memory.LAYER and isinstance(args[0], FakeTensor):
            made = cpu_kernel_memory.with_workspace(made, args)
        scratch = cpu_kernel_memory.scratch_bytes(func, args, made)
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.device.type == self._type:
                self._see(leaf)
        self.peak = max(self.peak, self.live + scratch)
        return made

    def _rounded(self, size: int) -> int:
        return -(-size // self._block) * self._block

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, self._rounded(storage.nbytes())
        known = self._sizes.get(key)
        if known is not None:
            self.live += size - known[0]  # resized in place, or as it was
            self._sizes[key] = (size, known[1])
            return
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._sizes[key] = (size, reference)
        self.live += size

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)[0]


def _one_of(dtype: torch.dtype) -> float | int | bool | complex:
    if dtype == torch.bool:
        return True
    if dtype.is_complex:
        return 1 + 0j
    return 1.0 if dtype.is_floating_point else 1
