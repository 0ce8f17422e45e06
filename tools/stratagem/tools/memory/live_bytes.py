"""Count the bytes of live tensors, real or fake, after each operation."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

# ---- Live bytes ----
#
# The bytes of tensors are counted from their creation to their end, operation by operation, for
# real tensors and for fake ones; with fake ones, whole training steps can be played through for
# models far larger than this machine. The memory that a kernel needs inside an operation is not
# seen.

CUDA_BLOCK_BYTES: Final = 512
"""The granularity of torch's CUDA allocator."""

_READ_VALUE: Final = torch.ops.aten._local_scalar_dense.default


class LiveBytes(TorchDispatchMode):
    """Context manager that counts live storages: each storage made on `device` counts until freed.
    A fake tensor has no values. Where a program reads one (the loss, a norm, a count) it gets 1."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = device.type
        self._block = CUDA_BLOCK_BYTES if device.type == "cuda" else 1
        self._sizes: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self.live = 0
        self.peak = 0
        self.before_backward = 0
        """The most bytes that were live when a backward pass began."""
        self._is_in_backward = False

    def forget_peak(self) -> None:
        """Begin new peaks, from the bytes that are live now."""
        self.peak, self.before_backward = self.live, 0

    def size_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the storages of these tensors; a shared storage counts once."""
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
        if func is LAYER and isinstance(args[0], FakeTensor):
            made = with_workspace(made, args)
        scratch = scratch_bytes(func, args, made)
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


# ---- Memory of CPU kernels ----
#
# Some CPU kernels take memory besides their outputs, which fake tensors do not show. The LSTM of
# oneDNN returns its workspace as an opaque tensor, and torch's shape function says that it is
# empty. It grows by the same amount with each time step, so the kernel is run for one and for two.
# Convolutions that oneDNN does not do, those in float64, unfold their input into columns.

_CONVOLUTIONS: Final = (
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
)
LAYER: Final = torch.ops.aten.mkldnn_rnn_layer.default
BACKWARD: Final = torch.ops.aten.mkldnn_rnn_layer_backward.default
SCRATCH_FRACTION: Final = 0.28
"""The extra memory of an LSTM's backward pass, as a fraction of the layer's workspace. Measured:
0.272 to 0.280 for 16 to 32 rows, 24 to 48 time steps and 64 to 128 features."""


def with_workspace(made: Any, args: tuple[Any, ...]) -> Any:
    """Return an LSTM layer's outputs, the last (its workspace) as large as a kernel makes it."""
    *others, workspace = made
    size = workspace_bytes(args)
    return (*others, torch.empty(size, dtype=workspace.dtype, device=workspace.device))


def workspace_bytes(args: tuple[Any, ...]) -> int:
    """Return the size of an LSTM's workspace; its input, args[0], is (time, rows, features)."""
    one, two = (_run(args, num_steps) for num_steps in (1, 2))
    num_steps: int = args[0].shape[0]
    return one + (num_steps - 1) * (two - one)


def scratch_bytes(func: Any, args: tuple[Any, ...], made: Any) -> int:
    """Return the temporary memory that an operation needs, given its arguments and its result."""
    if func is BACKWARD:  # its last argument is the workspace
        return int(SCRATCH_FRACTION * args[-1].untyped_storage().nbytes())
    if func in _CONVOLUTIONS:
        is_backward = func is _CONVOLUTIONS[1]
        x, weight = args[1:3] if is_backward else args[:2]
        return _columns_bytes(x, weight, args[0] if is_backward else made)
    return 0


def _columns_bytes(x: Tensor, weight: Tensor, output: Tensor) -> int:
    """Return the size of the unfolded input of a convolution. x: (rows, channels, …); weight: (…,
    …, *kernel); output: (rows, …, *size)."""
    if x.device.type != "cpu" or x.dtype != torch.float64 or weight.dim() < 4:
        return 0
    columns = x.shape[1] * weight.shape[2:].numel()
    return x.shape[0] * columns * output.shape[2:].numel() * x.element_size()


def _run(args: tuple[Any, ...], num_steps: int) -> int:
    x, *rest = args
    shapes = [(num_steps, *x.shape[1:])]
    shapes += [tuple(argument.shape) for argument in rest if isinstance(argument, Tensor)]
    plain = [argument for argument in rest if not isinstance(argument, Tensor)]
    with _disable_current_modes(), torch.enable_grad():
        tensors = [torch.zeros(shape, dtype=x.dtype) for shape in shapes]
        workspace: Tensor = LAYER(*tensors, *plain)[3]
        return workspace.untyped_storage().nbytes()
