"""What the CPU's LSTM kernel keeps for its backward pass, which no fake tensor tells.

oneDNN hands its workspace over as an opaque tensor, and torch's shape function says that it is
empty. It grows by the same amount with each time step, so the kernel is run for one and for two.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

LAYER: Final = torch.ops.aten.mkldnn_rnn_layer.default
BACKWARD: Final = torch.ops.aten.mkldnn_rnn_layer_backward.default
SCRATCH_FRACTION: Final = 0.28
"""Of the workspace: what backward needs beside it for a moment. Measured, 0.272 to 0.280 for 16 to
32 rows, 24 to 48 time steps and 64 to 128 features."""


def with_workspace(made: Any, args: tuple[Any, ...]) -> Any:
    """The outputs of the layer, the last with as many bytes as the kernel would fill."""
    *others, workspace = made
    size = workspace_bytes(args)
    return (*others, torch.empty(size, dtype=workspace.dtype, device=workspace.device))


def workspace_bytes(args: tuple[Any, ...]) -> int:
    """From the arguments of the layer; the input is (time, rows, features)."""
    one, two = (_run(args, num_steps) for num_steps in (1, 2))
    num_steps: int = args[0].shape[0]
    return one + (num_steps - 1) * (two - one)


def scratch_bytes(args: tuple[Any, ...]) -> int:
    """From the arguments of the layer's backward, whose last one is the workspace."""
    return int(SCRATCH_FRACTION * args[-1].untyped_storage().nbytes())


def _run(args: tuple[Any, ...], num_steps: int) -> int:
    x, *rest = args
    shapes = [(num_steps, *x.shape[1:])]
    shapes += [tuple(each.shape) for each in rest if isinstance(each, Tensor)]
    plain = [each for each in rest if not isinstance(each, Tensor)]
    with _disable_current_modes(), torch.enable_grad():
        tensors = [torch.zeros(shape, dtype=x.dtype) for shape in shapes]
        workspace: Tensor = LAYER(*tensors, *plain)[3]
        return workspace.untyped_storage().nbytes()
