"""The check that a step may be applied: its loss and all its gradients must be finite numbers.

Finding their norm is the one pass over the gradients: it is reported, and clipping uses it. What
becomes of a step that is not finite is the job's `accumulation.non_finite`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stratagem.common.base.errors import UserCodeError
from stratagem.worker.exchange.buckets.gradient_norm import parts_of, total_norm


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """The result of a check: what is not finite ("" for nothing), and the gradients' 2-norm."""

    what: str
    norm: Tensor
    """0-d. Before clipping."""


def are_finite(norm: Tensor, grads: Sequence[Tensor]) -> bool:
    """Returns whether every element of the gradients, whose norm is `norm`, is finite.

    The norm of finite gradients may overflow; only then are the elements looked at one by one.
    """
    return math.isfinite(norm.item()) or all(bool(torch.isfinite(grad).all()) for grad in grads)


def inspect(
    loss: float,
    weight: float,
    grads: Sequence[Tensor],
    *,
    is_clipped: bool,
    numerics: int,
    norms: Sequence[Tensor] | None = None,
) -> GradientCheck:
    """Looks at a step's mean loss, its weight and its gradients; norms: what `parts_of` says of
    them, if it is known already.

    is_clipped: an infinite norm is then no good either, as scaling by it would erase the step.
    """
    norm = total_norm(parts_of(grads, numerics) if norms is None else norms, numerics)
    is_finite = are_finite(norm, grads)
    return GradientCheck(what_is_wrong(loss, weight, norm, is_finite, is_clipped=is_clipped), norm)


def what_is_wrong(
    loss: float, weight: float, norm: Tensor, has_finite_gradients: bool, *, is_clipped: bool
) -> str:
    """Returns the words for what is not finite; "" when all is well."""
    if not math.isfinite(loss):
        return "loss" if weight else "loss (nothing was counted)"
    if not has_finite_gradients:
        return "gradient"
    if is_clipped and not math.isfinite(norm.item()):
        return "gradient norm"
    return ""


def not_finite(what: str, activity: str, step: int | None = None) -> UserCodeError:
    """The error that ends a run; step counts from 1."""
    where = "" if step is None else f" at step {step}"
    return UserCodeError("FloatingPointError", f"non-finite {what}{where}", activity=activity)
