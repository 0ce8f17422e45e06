"""Run a model's program, or the part of it that is one stage.

The uses of a node's output are separate: each gets a different tensor (over the same memory), and
their gradients are added in falling order of use. So the sum does not depend on which uses are
computed here and which on another worker.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as has_hooks_for_all_modules

from stratagem.common.model.program import Bundle, Call, FromNode, ModelInput, NodeInput, Source

# ---- Run a program ----

Slots = dict[tuple[str, int], Any]
"""Values of nodes' outputs, keyed by (node, use); each is removed when it is used."""


def run_calls(
    calls: Iterable[Call],
    module_of: Mapping[str, nn.Module],
    num_uses: Mapping[str, int],
    given: Any,
    slots: Slots,
) -> None:
    """Run the calls in order. Outputs for other stages remain in `slots`."""
    for call in calls:
        arguments = [evaluate(arg, given, slots) for arg in call.args]
        put(slots, call.node, num_uses[call.node], module_of[call.node](*arguments))


def put(slots: Slots, node: str, num_uses: int, value: Any) -> None:
    """Store a node's output for each of its uses."""
    for use, copy in enumerate(_fan(value, num_uses)):
        slots[node, use] = copy


def evaluate(source: Source, given: Any, slots: Slots) -> Any:
    """Return the value of a call's argument: outputs in `slots`, or the model's input `given`."""
    match source:
        case ModelInput():
            return given
        case FromNode(node, use):
            return slots.pop((node, use))
        case NodeInput(of, index, count):
            return _part(evaluate(of, given, slots), index, count)
        case Bundle(parts):
            return tuple(evaluate(part, given, slots) for part in parts)


def add_uses(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """Add the gradients of a value's uses, given in order of use, beginning with the last one."""
    total: Tensor | None = None
    for gradient in reversed(list(gradients)):
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def map_nested(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply `change` to every tensor in nested tuples, lists and dicts; return the nesting."""
    match value:
        case Tensor():
            return change(value)
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(map_nested(item, change) for item in value))
        case tuple() | list():
            return type(value)(map_nested(item, change) for item in value)
        case dict():
            return {key: map_nested(item, change) for key, item in value.items()}
        case _:
            return value


def _part(value: Any, index: int, count: int) -> Any:
    if not isinstance(value, tuple | list):
        return value
    members = value * count if len(value) == 1 else value
    if len(members) != count:
        raise ValueError(f"the graph has {count} inputs, {len(members)} were given")
    return members[index]


class _Fan(torch.autograd.Function):
    """Autograd function that returns a value once per use, and adds gradients in order."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        return add_uses(gradients), None


def _fan(value: Any, count: int) -> list[Any]:
    if count < 2 or not torch.is_grad_enabled():
        return [value] * count
    fanned: dict[int, tuple[Tensor, ...]] = {}

    def use(number: int) -> Callable[[Tensor], Tensor]:
        def pick(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            if id(tensor) not in fanned:
                fanned[id(tensor)] = _Fan.apply(tensor, count)  # type: ignore[no-untyped-call]
            return fanned[id(tensor)][number]

        return pick

    return [map_nested(value, use(number)) for number in range(count)]


# ---- Stochastic modules and known code ----


def draws_random_numbers(module: nn.Module) -> bool:
    """Return whether a module may draw random numbers: torch's stochastic modules, and all others
    than torch's."""
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
    """Return whether a pass through the model surely runs only code of torch and Stratagem.

    False if the model has a class, hook or function of the user, or a tensor subclass.
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
