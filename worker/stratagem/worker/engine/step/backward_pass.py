"""The backward pass from a loss, begun with a given gradient."""

from typing import Final

import torch
from torch import Tensor

_ENGINE: Final = getattr(torch.autograd.graph, "_engine_run_backward", None)


def run_backward(root: Tensor, begin: Tensor | None) -> None:
    """What `root.backward(begin)` does, and the same bits; both are 0-d.

    For a gradient that it is given torch compares two shapes, with a library for symbolic ones: the
    first time imports that for 0.4 s, in every process. What has no behaviour of its own for
    torch's functions is handed to the engine as torch does it then.
    """
    if begin is None or _ENGINE is None or type(root) is not Tensor:
        root.backward(begin)
        return
    _ENGINE((root,), (begin,), False, False, (), allow_unreachable=True, accumulate_grad=True)
