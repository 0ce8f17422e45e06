"""The check that the gradients of a step are finite numbers.

Finding their norm is the one pass over the gradients: it is reported, and clipping uses it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.worker.exchange.buckets.gradient_norm import parts_of, total_norm


@dataclass(frozen=True, slots=True)
class StepSummary:
    """What all members know of a step before they apply it."""

    loss: float
    """Mean over `weight` rows or tokens."""
    weight: float
    norm: Tensor
    """2-norm of the whole gradient, 0-d, before clipping."""
    is_finite: bool
    """Whether all elements of the gradients are finite."""


def are_finite(norm: Tensor, grads: Sequence[Tensor]) -> bool:
    """Returns whether every element of the gradients, whose norm is `norm`, is finite.

    The norm of finite gradients may overflow; only then are the elements looked at one by one.
    """
    return math.isfinite(norm.item()) or all(bool(torch.isfinite(grad).all()) for grad in grads)


def after_hook(
    summary: StepSummary, hook: Callable[[], None] | None, again: Callable[[], StepSummary]
) -> StepSummary:
    """Has a hook change the gradients of a step, if it is finite; returns the summary of what they
    are then, which `again` makes."""
    if hook is None or not (summary.is_finite and math.isfinite(summary.loss)):
        return summary
    hook()
    return again()


def summarize(
    loss: float,
    weight: float,
    grads: Sequence[Tensor],
    numerics: int,
    norms: Sequence[Tensor] | None = None,
) -> StepSummary:
    """Summarizes a step with these gradients; norms: what `parts_of` says of them, if known."""
    norm = total_norm(parts_of(grads, numerics) if norms is None else norms, numerics)
    return StepSummary(loss, weight, norm, are_finite(norm, grads))
