"""Optimizers by their torch.optim names, learning-rate schedules, and clipping.

A schedule is a pure function of the step, so it has no state to save. Steps run per parameter
tensor (foreach is off, and fused kernels keep to one tensor too): the same bits whatever other
parameters there are, and however many threads.
Must not know where gradients come from.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, assert_never

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from stratagem.common.errors import InvalidInputError
from stratagem.common.job import OptimizerSpec, ScheduleSpec
from stratagem.common.json_text import not_one_of, unknown_key

# They need a closure (LBFGS) or gradients of another kind (SparseAdam).
_EXCLUDED: Final = frozenset({"LBFGS", "SparseAdam", "Optimizer"})
_OPTIMIZERS: Final = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name not in _EXCLUDED
}
_BARE_STEPS: Final[Mapping[type, Callable[[torch.optim.Optimizer], object]]] = {
    kind: inspect.unwrap(kind.step) for kind in _OPTIMIZERS.values()
}
_RESERVED: Final = frozenset({"self", "params", "lr", "foreach", "fused", "capturable"})


def has_fused_kernels(spec: OptimizerSpec) -> bool:
    """Whether torch has kernels that do a whole update of a tensor at once."""
    kind = _OPTIMIZERS.get(spec.name.lower())
    return kind is not None and "fused" in inspect.signature(kind).parameters


def make_optimizer(
    spec: OptimizerSpec, params: Iterable[nn.Parameter], *, fused: bool = False
) -> torch.optim.Optimizer:
    """A fresh optimizer of the named kind over these parameters.

    On the CPU each tensor is updated in one pass, where torch has such a kernel; fused: on other
    devices too. Its bits are others, but they too depend on nothing but the tensor.
    """
    params = list(params)
    kind = _OPTIMIZERS.get(spec.name.lower())
    if kind is None:
        raise InvalidInputError.at("optimizer.name", not_one_of(spec.name, sorted(_OPTIMIZERS)))
    known = inspect.signature(kind).parameters
    allowed = sorted(set(known) - _RESERVED)
    for key in spec.kwargs:
        if key not in allowed:
            raise InvalidInputError.at(f"optimizer.{key}", unknown_key(key, allowed))
    kwargs: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in spec.kwargs.items()
    }
    kwargs["lr"] = spec.lr
    if "foreach" in known:
        kwargs["foreach"] = False
    if "fused" in known and not kwargs.get("differentiable"):
        kwargs["fused"] = fused or all(p.is_cpu and p.is_floating_point() for p in params)
    try:
        return kind(params, **kwargs)
    except (ValueError, TypeError) as error:
        raise InvalidInputError.at("optimizer", f"{spec.name}: {error}") from error


def learning_rate(spec: OptimizerSpec, step: int, num_steps: int) -> float:
    """The rate for the update that follows `step` applied ones, of `num_steps` in all."""
    if spec.schedule is None:
        return spec.lr
    return spec.lr * schedule_factor(spec.schedule, step, num_steps)


def schedule_factor(spec: ScheduleSpec, step: int, num_steps: int) -> float:
    """What the schedule makes of a rate of 1. Warm-up rises linearly and reaches 1 at its end."""
    warmup, final = spec.warmup_steps, spec.final_lr_fraction
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    match spec.name:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - final) * progress
        case "cosine":
            return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "step":
            return float(spec.gamma ** ((step - warmup) // (spec.step_size_steps or num_steps)))
        case _:
            assert_never(spec.name)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Applies to all parameters from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def update(optimizer: torch.optim.Optimizer) -> None:
    """One step of the optimizer, with the bits of `optimizer.step()`.

    torch wraps a label for its profiler, looks for hooks and two switches of mode around each
    step: for a small model they take longer than the update. They are passed over where nobody
    would notice, which is where nothing is recorded and no hook is registered.
    """
    if (
        torch._C._autograd._profiler_enabled()
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or optimizer.defaults.get("differentiable")
    ):
        optimizer.step()
        return
    with torch.no_grad():
        _BARE_STEPS[type(optimizer)](optimizer)


def clip(params: Sequence[nn.Parameter], max_norm: float | None, norm: Tensor) -> None:
    """Scales all gradients together so that their 2-norm, which is `norm` (0-d) now, is at most
    `max_norm`."""
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(params, max_norm, norm, foreach=False)
