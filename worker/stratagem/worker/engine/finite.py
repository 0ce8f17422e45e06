"""Training ends where a loss or a gradient is no finite number; says at which step it was."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stratagem.common.errors import UserCodeError


def check_finite(what: str, value: float, step: int) -> None:
    """Raises UserCodeError unless the value is finite; step counts from 1."""
    if not math.isfinite(value):
        raise UserCodeError(
            "FloatingPointError",
            f"non-finite {what} at step {step}",
            activity=f"training step {step}",
        )


def check_gradients(grads: Sequence[Tensor], step: int) -> None:
    """Raises UserCodeError unless all elements of all gradients are finite."""
    if math.isfinite(nn.utils.get_total_norm(grads, foreach=False).item()):
        return
    # The norm alone may have overflowed.
    if not all(bool(torch.isfinite(grad).all()) for grad in grads):
        check_finite("gradient", math.nan, step)
