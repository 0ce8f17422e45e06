"""Adaptation of the lengths of the phases to the loss.

Pure functions of the lengths and the losses of Full steps, which are equal on all replicas. A
length moves in the intended direction or not at all, within limits that follow from the job.
"""

from typing import Final, NamedTuple

from stratagem.common.job.schedules import PhasesSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.phases.loss_history import LossHistory

FALL_SHARE: Final = 0.05
"""A fall by more than this share of |loss| is a fall."""


class Lengths(NamedTuple):
    """The lengths of the phases of a cycle, in steps."""

    full: int
    predict: int


def configured(spec: PhasesSpec) -> Lengths:
    return Lengths(spec.full_steps, spec.predict_steps)


def adapted(
    lengths: Lengths, losses: LossHistory, spec: PhasesSpec, numerics: int = CURRENT
) -> Lengths:
    """Returns the lengths of the next cycle: more exact steps after a rise of the loss, more
    predicted ones after a fall."""
    if not spec.adaptive.enabled:
        return lengths
    window = spec.adaptive.window
    if losses.rise(window, spec.adaptive.loss_threshold, numerics) is not None:
        return Lengths(_longer_full(lengths, spec), _shorter_predict(lengths, spec, 0.75))
    change = losses.change(window)
    if change is not None and change < -FALL_SHARE:
        least, _ = spec.full_limits
        _, most = spec.predict_limits
        shorter = min(lengths.full, max(lengths.full - _tenth(spec.full_steps), least))
        longer = max(lengths.predict, min(lengths.predict + _tenth(spec.predict_steps), most))
        return Lengths(shorter, longer)
    return lengths


def after_failed_check(lengths: Lengths, spec: PhasesSpec) -> Lengths:
    """Returns lengths with half as many predicted steps: the last ones led to where the prediction
    was wrong."""
    if not spec.adaptive.enabled:
        return lengths
    return lengths._replace(predict=_shorter_predict(lengths, spec, 0.5))


def _longer_full(lengths: Lengths, spec: PhasesSpec) -> int:
    _, most = spec.full_limits
    return max(lengths.full, min(lengths.full + 2 * _tenth(spec.full_steps), most))


def _shorter_predict(lengths: Lengths, spec: PhasesSpec, share: float) -> int:
    least, _ = spec.predict_limits
    return min(lengths.predict, max(int(lengths.predict * share), least))


def _tenth(length: int) -> int:
    return -(-length // 10)
