"""Computes the memory that some CPU kernels take besides their outputs, which fake tensors do not
show.

The LSTM of oneDNN returns its workspace as an opaque tensor, and torch's shape function says
that it is empty. It grows by the same amount with each time step, so the kernel is run for one and
for two. Convolutions that oneDNN does not do, those in float64, unfold their input into columns.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_CONVOLUTIONS: Final = (
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
)
LAYER: Final = torch.ops.aten.mkldnn_rnn_layer.default
BACKWARD: Final = torch.ops.aten.mkldnn_rnn_layer_backward.default
SCRATCH_FRACTION: Final = 0.28
"""Of the workspace of an LSTM: what backward needs more for a moment. Measured: 0.272 to 0.280
for 16 to 32 rows, 24 to 48 time steps and 64 to 128 features."""


def with_workspace(made: Any, args: tuple[Any, ...]) -> Any:
    """The outputs of the layer, the last with as many bytes as the kernel would fill."""
    *others, workspace = made
    size = workspace_bytes(args)
    return (*others, torch.empty(size, dtype=workspace.dtype, device=workspace.device))


def workspace_bytes(args: tuple[Any, ...]) -> int:
    """Return the workspace of the layer with these arguments; the input is (time, rows,
    features)."""
    one, two = (_run(args, num_steps) for num_steps in (1, 2))
    num_steps: int = args[0].shape[0]
    return one + (num_steps - 1) * (two - one)


def scratch_bytes(func: Any, args: tuple[Any, ...], made: Any) -> int:
    """Return the temporary memory of an operation, computed from its arguments and its result."""
    if func is BACKWARD:  # its last argument is the workspace
        return int(SCRATCH_FRACTION * args[-1].untyped_storage().nbytes())
    if func in _CONVOLUTIONS:
        is_backward = func is _CONVOLUTIONS[1]
        x, weight = args[1:3] if is_backward else args[:2]
        return _columns_bytes(x, weight, args[0] if is_backward else made)
    return 0


def _columns_bytes(x: Tensor, weight: Tensor, output: Tensor) -> int:
    """x: (rows, channels, …); weight: (…, …, *kernel); output: (rows, …, *size)."""
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
