"""Tests whether modules may draw random numbers, and whether a model runs only known code."""

from itertools import chain

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as has_hooks_for_all_modules


def draws_random_numbers(module: nn.Module) -> bool:
    """Returns whether a module may draw: torch's stochastic ones, and all that are not torch's."""
    kind = type(module)
    if not kind.__module__.startswith("torch.nn."):
        return True
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(
        module,
        nn.modules.dropout._DropoutNd | nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d,
    )


def runs_only_known_code(model: nn.Module) -> bool:
    """Returns whether a pass through the model, as it is now, runs no code but torch's and ours.

    True only if it has no class, hook or function of the user's, and no tensor of a class of its
    own. When in doubt, False.
    """
    return (
        not has_hooks_for_all_modules()
        and all(_is_known(module) for module in model.modules())
        and all(_is_bare(tensor) for tensor in chain(model.parameters(), model.buffers()))
    )


def _is_known(module: nn.Module) -> bool:
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return (
        type(module).__module__.startswith(("torch.nn.modules.", f"{__package__}."))
        and not any(hooks)
        and not any(callable(value) for value in vars(module).values())
    )


def _is_bare(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and not tensor._backward_hooks
        and not getattr(tensor, "_post_accumulate_grad_hooks", None)
    )
