"""The numbers by which known gradients are multiplied to predict one: pure arithmetic.

Both predictors are linear in the gradients, so a prediction is Σ cᵢ·gᵢ with coefficients that
depend only on when the gradients were computed. Distances are true: steps between the gradients,
predicted ones included. How far a slope is followed is damped: `d + d² + … + d^ahead` steps, so a
prediction comes to rest as the distance grows.
"""

from collections.abc import Sequence
from itertools import pairwise

from stratagem.common.job.schedules import PredictorSpec

_LEAST_DETERMINANT = 1e-10


def coefficients(spec: PredictorSpec, steps: Sequence[int], target: int) -> list[float]:
    """Returns one coefficient per gradient. steps: when they were computed, ascending; target: the
    step to predict.

    One gradient alone is carried on as it is. Raises ValueError without gradients, for steps that
    do not ascend, and for a target that is not ahead.
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
    """Steps that a slope is followed for."""
    total, power = 0.0, 1.0
    for _ in range(ahead):
        power *= damping
        total += power
    return total


def _momentum(steps: Sequence[int], followed: float) -> list[float]:
    """The last gradient plus the last difference per step, followed."""
    if len(steps) == 1:
        return [1.0]
    share = followed / (steps[-1] - steps[-2])
    return [0.0] * (len(steps) - 2) + [-share, 1.0 + share]


def _least_squares(steps: Sequence[int], decay: float, followed: float) -> list[float]:
    """Line b + v·t through the gradients at t = step − newest step, weights decay^(−t)."""
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
