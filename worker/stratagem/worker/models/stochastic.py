"""Which modules may draw random numbers."""

from __future__ import annotations

from torch import nn


def draws_random_numbers(module: nn.Module) -> bool:
    """True for torch's stochastic modules, and for every class that is not torch's own."""
    kind = type(module)
    if not kind.__module__.startswith("torch.nn."):
        return True
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(
        module,
        nn.modules.dropout._DropoutNd | nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d,
    )
