"""Predict a gradient from known ones, and measure the quality of the prediction.

Both predictors are linear in the gradients, so a prediction is Σ cᵢ·gᵢ with coefficients that
depend only on the steps at which the gradients were computed. Distances are true: they count all
steps between the gradients, predicted ones included. The slope is damped: it is followed for `d +
d² + … + d^ahead` steps, so a prediction comes to rest as the distance grows.
"""

import math
from collections.abc import Sequence
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from stratagem.common.job.schedules import PredictorSpec
from stratagem.worker.phases.schedule import Quality

# ---- Coefficients of the predictors ----

_LEAST_DETERMINANT = 1e-10


def coefficients(spec: PredictorSpec, steps: Sequence[int], target: int) -> list[float]:
    """Return one coefficient per gradient. steps: of the gradients, ascending; target: the step to
    predict.

    A single gradient is predicted to stay as it is. Raises ValueError without gradients, for steps
    that do not ascend, and for a target that is not ahead.
    """
    if not steps:
        raise ValueError("there is no gradient to predict from")
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError(f"steps must ascend: {list(steps)}")
    ahead = target - steps[-1]
    if ahead < 1:
        raise ValueError(f"step {target} is not ahead of step {steps[-1]}")
    if spec.kind == "momentum":
        return _momentum(steps, _followed(spec.momentum, ahead))
    return _least_squares(steps, spec.decay, _followed(spec.damping, ahead))


def _followed(damping: float, ahead: int) -> float:
    """Return the damped number of steps for which a slope is followed: d + d² + … + d^ahead."""
    total, power = 0.0, 1.0
    for _ in range(ahead):
        power *= damping
        total += power
    return total


def _momentum(steps: Sequence[int], followed: float) -> list[float]:
    """Return the coefficients that extrapolate by the last difference per step."""
    if len(steps) == 1:
        return [1.0]
    share = followed / (steps[-1] - steps[-2])
    return [0.0] * (len(steps) - 2) + [-share, 1.0 + share]


def _least_squares(steps: Sequence[int], decay: float, followed: float) -> list[float]:
    """Return coefficients of the line fit b + v·t, t = step − newest step, weights decay^(−t)."""
    times = [float(step - steps[-1]) for step in steps]
    weights = [decay**-time for time in times]
    s0 = sum(weights)
    s1 = sum(weight * time for weight, time in zip(weights, times, strict=True))
    s2 = sum(weight * time * time for weight, time in zip(weights, times, strict=True))
    determinant = s0 * s2 - s1 * s1
    if determinant < _LEAST_DETERMINANT:
        return [0.0] * (len(steps) - 1) + [1.0]
    return [
        weight * ((s2 - s1 * time) + (s0 * time - s1) * followed) / determinant
        for weight, time in zip(weights, times, strict=True)
    ]


# ---- Gradient history ----
#
# Gradients are flat (N,): all parameters one after the other, in the widest of their dtypes and at
# least float32. Every element is multiplied and added by itself, never with a fused operation, so
# neither the place of an element nor the vector width of the machine is in its bits; norms are sums
# in float64 in an order that torch's thread count fixes, as in clipping.

MAX_RELATIVE_ERROR = 1e9
"""The value reported for every larger error, since JSON has no infinity."""


def flat_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype that can hold gradients of all these dtypes."""
    return reduce(torch.promote_types, dtypes, torch.float32)


def norm(flat: Tensor) -> float:
    """Return the Euclidean norm, summed in float64."""
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64))


def quality(exact: Tensor, predicted: Tensor) -> Quality:
    """Return the quality of a prediction of the exact gradient; both are (N,).

    The cosine follows from three norms by the law of cosines. Zero is a perfect prediction of zero.
    """
    distance, length, predicted_length = norm(exact - predicted), norm(exact), norm(predicted)
    if distance == 0:
        return Quality(0.0, 1.0)
    error = distance / length if length else math.inf
    if not error <= MAX_RELATIVE_ERROR:  # nor where nothing is a number
        return Quality(MAX_RELATIVE_ERROR, 0.0)
    if predicted_length == 0:
        return Quality(error, 0.0)
    ratio = predicted_length / length
    cosine = (1.0 + ratio * ratio - error * error) / (2.0 * ratio)
    return Quality(error, min(1.0, max(-1.0, cosine)))


class GradientHistory:
    """The last exact gradients with their steps, from which later ones are predicted."""

    def __init__(self, spec: PredictorSpec, trust: float) -> None:
        self._spec, self._trust = spec, trust
        self._capacity = spec.history if spec.kind == "wls" else 2
        self.steps: list[int] = []
        self.gradients: list[Tensor] = []
        """The gradients, (N,) each, oldest first."""
        self._last_norm: float | None = None  # until a prediction asks

    def record(self, step: int, gradient: Tensor) -> None:
        """Add the exact gradient (N,) of a step, without a copy; steps must ascend."""
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step {step} comes after step {self.steps[-1]}")
        self.replace([*self.steps, step], [*self.gradients, gradient])

    def predict(self, step: int) -> Tensor:
        """Return the predicted gradient (N,) of a later step, as a new tensor.

        Its norm is limited to `trust` times the norm of the last exact gradient; the direction is
        kept.
        """
        shares = coefficients(self._spec, self.steps, step)
        total = self.gradients[0] * shares[0]
        for share, gradient in zip(shares[1:], self.gradients[1:], strict=True):
            total += gradient * share
        if self._last_norm is None:
            self._last_norm = norm(self.gradients[-1])
        length, limit = norm(total), self._trust * self._last_norm
        return total.mul_(limit / length) if length > limit else total

    def replace(self, steps: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Replace all gradients, given oldest first; if too many, only the newest are kept."""
        newest = slice(-self._capacity, None)
        self.steps, self.gradients = list(steps)[newest], list(gradients)[newest]
        self._last_norm = None
