"""The phase schedule gives each step its phase; it is a pure state machine over a JSON-able state.

`begin` opens the next step and returns its phase; `end` closes it with the measured values. Between
the two the phase cannot change, however often `begin` is called. All decisions follow from sums
over the whole batch, so replicas decide alike.

    FULL     the gradient is computed; `full_steps` of them, then PREDICT if the back-test passed
             and the loss does not diverge
    PREDICT  the gradient is predicted; `predict_steps` of them in a cycle, then FULL
    CORRECT  one exact step after every `correct_every` predictions: PREDICT again if they were
             good, else FULL. None if the budget is used up: the FULL step that follows is exact.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple, assert_never

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job.schedules import PhasesSpec
from stratagem.common.numerics.rules import CURRENT

# ---- Loss history ----
#
# Every comparison is relative to |loss|, so that losses at and below zero mean the same as others.

MAX_LOSSES: Final = 1000
SPIKE_DEVIATIONS: Final = 3.0
DIVERGENCE_SHARE: Final = 0.2
SIGNIFICANT_ERRORS: Final = 2.0
_LEAST_HALF: Final = 4
# Losses that do not vary at all have no deviation to measure by; rounding is no spike.
_LEAST_DEVIATION: Final = 1e-6


@dataclass(frozen=True, slots=True)
class LossSummary:
    """Statistics of all kept losses. variance: the population variance."""

    mean: float
    variance: float
    deviation: float
    least: float
    most: float
    median: float


class Rise(NamedTuple):
    """A rise of the mean loss from one window of steps to the next."""

    window: int
    """Number of losses in each window."""
    change: float
    """(newer − older) / |older| of the windows' means."""


@dataclass(frozen=True, slots=True)
class LossHistory:
    """The latest losses, oldest first; at most `capacity` of them."""

    losses: tuple[float, ...] = ()
    capacity: int = MAX_LOSSES

    def recorded(self, loss: float) -> "LossHistory":
        """Return the history with one more loss; the oldest is dropped if there is no room."""
        return LossHistory((*self.losses, loss)[-self.capacity :], self.capacity)

    def summary(self) -> LossSummary | None:
        """Return the statistics of all losses; None if there are none."""
        if not self.losses:
            return None
        variance = statistics.pvariance(self.losses)
        return LossSummary(
            mean(self.losses),
            variance,
            math.sqrt(variance),
            min(self.losses),
            max(self.losses),
            statistics.median(self.losses),
        )

    def rolling_average(self, window: int) -> float | None:
        """Return the mean of the last `window` losses; None while there are fewer."""
        return mean(self.losses[-window:]) if len(self.losses) >= window else None

    def change(self, window: int) -> float | None:
        """Return (newer − older) / |older| of the last two windows' means; None if there are too
        few losses.

        An older mean of zero counts as the smallest positive number.
        """
        if len(self.losses) < 2 * window:
            return None
        older, newer = mean(self.losses[-2 * window : -window]), mean(self.losses[-window:])
        return _relative(newer - older, older)

    def is_converging(self, threshold: float) -> bool:
        """Return whether the mean of the newer half is lower than that of the older half by more
        than this share."""
        change = self.change(len(self.losses) // 2) if len(self.losses) >= 2 else None
        return change is not None and -change > threshold

    def is_diverging(self, window: int, numerics: int = CURRENT) -> bool:
        """Return whether the loss has risen by more than a fifth, as `rise` measures it."""
        return self.rise(window, DIVERGENCE_SHARE, numerics) is not None

    def rise(self, window: int, share: float, numerics: int = CURRENT) -> Rise | None:
        """Return the rise between the last two windows if it exceeds `share`, else None.

        From `numerics` 2 on, longer windows and halves are checked, too, to find slow rises: such a
        rise must exceed twice its standard error, and continue in the last windows at half its
        speed or more.
        """
        change = self.change(window)
        if change is not None and change > share:
            return Rise(window, change)
        for size in self._longer_windows(window) if numerics >= 2 else ():
            slow = self.change(size)
            if slow is None or slow <= share or not self._is_significant(size):
                continue
            if change is None or change > slow * window / size / 2:
                return Rise(size, slow)
        return None

    def _longer_windows(self, window: int) -> list[int]:
        half = len(self.losses) // 2
        sizes = [window << power for power in range(1, half.bit_length()) if window << power < half]
        is_enough = len(self.losses) >= window and half >= _LEAST_HALF and half != window
        return [*sizes, half] if is_enough else sizes

    def _is_significant(self, size: int) -> bool:
        older, newer = self.losses[-2 * size : -size], self.losses[-size:]
        low, high = mean(older), mean(newer)
        # Not by squares, which overflow where the losses themselves do not yet.
        deviations = [*(loss - low for loss in older), *(loss - high for loss in newer)]
        error = math.hypot(*deviations) / size
        return high - low > SIGNIFICANT_ERRORS * error

    def is_spike(self, window: int) -> bool:
        """Return whether the newest loss is more than three standard deviations above the mean of
        the `window` before it."""
        baseline = self.losses[-window - 1 : -1]
        if len(baseline) < max(window, 2):
            return False
        level = mean(baseline)
        deviation = max(statistics.pstdev(baseline), _LEAST_DEVIATION * abs(level))
        rise = self.losses[-1] - level
        return rise > 0 and rise > SPIKE_DEVIATIONS * deviation

    def improvement_rate(self) -> float | None:
        """Return (last − first) / |first|, negative if the loss falls; None below two losses."""
        if len(self.losses) < 2:
            return None
        return _relative(self.losses[-1] - self.losses[0], self.losses[0])


def mean(losses: Sequence[float]) -> float:
    """Return the exactly rounded mean, which does not depend on the order of addition."""
    return math.fsum(losses) / len(losses)


def _relative(difference: float, base: float) -> float:
    if difference == 0:
        return 0.0
    return difference / abs(base) if base else math.copysign(math.inf, difference)


# ---- Adaptation of phase lengths ----
#
# The lengths follow from the losses of Full steps, which are equal on all replicas. A length moves
# in the intended direction or not at all, within limits that follow from the job.

FALL_SHARE: Final = 0.05
"""A change by more than this negative share of |loss| counts as a fall."""


class Lengths(NamedTuple):
    """The numbers of full and predicted steps in a cycle."""

    full: int
    predict: int


def configured(spec: PhasesSpec) -> Lengths:
    return Lengths(spec.full_steps, spec.predict_steps)


def adapted(
    lengths: Lengths, losses: LossHistory, spec: PhasesSpec, numerics: int = CURRENT
) -> Lengths:
    """Return the next cycle's lengths: more exact steps if the loss rises, more predicted ones if
    it falls."""
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
    """Return lengths with half the predicted steps, since a check has found wrong predictions."""
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


# ---- Schedule ----

NUM_LOSSES: Final = 100
"""Number of losses kept per phase."""


class TrainingPhase(StrEnum):
    FULL = "FULL"
    PREDICT = "PREDICT"
    CORRECT = "CORRECT"

    @property
    def is_exact(self) -> bool:
        """True if steps of this phase compute their gradient."""
        return self is not TrainingPhase.PREDICT


class Quality(NamedTuple):
    """The quality of a prediction p of the gradient a: relative error ‖a − p‖ / ‖a‖, and cosine."""

    relative_error: float
    cosine: float

    def passes(self, spec: PhasesSpec) -> bool:
        is_close = self.relative_error <= spec.max_relative_error
        return is_close and self.cosine >= spec.min_correlation


class Counts(NamedTuple):
    """Number of finished steps per phase."""

    full: int = 0
    predict: int = 0
    correct: int = 0

    @property
    def total(self) -> int:
        return self.full + self.predict + self.correct


NO_STEPS: Final = Counts()


@dataclass(frozen=True, slots=True)
class State:
    """The state of the schedule between two steps, or within a step if `is_open`."""

    lengths: Lengths
    """The lengths of the present cycle, changed by adaptation."""
    phase: TrainingPhase = TrainingPhase.FULL
    """The phase of the open step, or of the last one if no step is open."""
    is_open: bool = False
    has_changed: bool = True
    """True if this phase differs from that of the step before."""
    num_full: int = 0
    """Number of finished Full steps in this cycle."""
    num_predicted: int = 0
    """Number of finished Predict steps in this cycle."""
    num_since_exact: int = 0
    """Number of Predict steps since the last exact gradient."""
    may_predict: bool = False
    """True if the latest check of predictions passed."""
    cycle: int = 0
    counts: Counts = NO_STEPS
    num_refused: int = 0
    """Number of cycles without predictions, because the back-test failed or the loss diverged."""
    num_fallbacks: int = 0
    """Number of corrections after which a cycle was given up."""
    last_check: Quality | None = None
    last_loss: float | None = None
    """The loss of the last exact step; None before the first."""
    full_losses: LossHistory = field(default_factory=lambda: LossHistory(capacity=NUM_LOSSES))
    correct_losses: LossHistory = field(default_factory=lambda: LossHistory(capacity=NUM_LOSSES))

    @property
    def total_step(self) -> int:
        """Number of finished steps."""
        return self.counts.total


class PhaseError(RuntimeError):
    """Raised for a call that does not fit the phase: a defect of the caller."""


def initial(spec: PhasesSpec) -> State:
    """Return the schedule's state before the first step."""
    return State(configured(spec))


def begin(state: State, spec: PhasesSpec, numerics: int = CURRENT) -> State:
    """Open the next step and return the schedule's new state; unchanged if a step is open."""
    if state.is_open:
        return state
    phase = _next_phase(state, spec)
    opened = replace(state, phase=phase, is_open=True, has_changed=phase is not state.phase)
    if state.total_step == 0:
        return replace(opened, has_changed=True)
    if phase is TrainingPhase.FULL and _is_cycle_over(state, spec):
        lengths = adapted(state.lengths, state.full_losses, spec, numerics)
        return _next_cycle(state, replace(opened, lengths=lengths))
    return opened


def end(
    state: State,
    spec: PhasesSpec,
    loss: float | None = None,
    checks: tuple[Quality, ...] = (),
    numerics: int = CURRENT,
) -> State:
    """Close the open step; return the new state.

    loss: mean over the global batch in an exact step; a predicted step has none. checks: quality of
    predictions of this step's gradient; see `check_due` and `back_test_due`. Raises PhaseError if
    no step is open or the arguments do not fit the phase.
    """
    if not state.is_open:
        raise PhaseError("end_step without begin_step")
    closed = replace(state, is_open=False, last_check=checks[-1] if checks else state.last_check)
    if state.phase is TrainingPhase.PREDICT:
        if loss is not None or checks:
            raise PhaseError("a PREDICT step has no exact gradient, so no loss and no check")
        return replace(
            closed,
            num_predicted=state.num_predicted + 1,
            num_since_exact=state.num_since_exact + 1,
            counts=state.counts._replace(predict=state.counts.predict + 1),
        )
    if loss is None:
        raise PhaseError(f"a {state.phase} step computes its gradient and so has a loss")
    closed = replace(closed, last_loss=loss)
    passed = bool(checks) and all(check.passes(spec) for check in checks)
    if state.phase is TrainingPhase.CORRECT:
        return _end_correct(closed, spec, loss, passed)
    losses = state.full_losses.recorded(loss)
    # Even where the gradients agree: predictions must not carry a run further away.
    may_predict = passed and not losses.is_diverging(spec.adaptive.window, numerics)
    return _end_full(replace(closed, full_losses=losses), spec, passed, may_predict)


def needed_full_steps(state: State, spec: PhasesSpec) -> int:
    """Return the number of Full steps in this cycle; the first cycle has the warm-up, too."""
    return state.lengths.full + (spec.warmup_steps if state.cycle == 0 else 0)


def check_due(state: State) -> bool:
    """Return whether the open step must check predictions, as the first exact step after some."""
    return state.is_open and state.phase.is_exact and state.num_since_exact > 0


def back_test_due(state: State, spec: PhasesSpec) -> bool:
    """Return whether the open Full step is the last one of its cycle, whose gradient the back-test
    compares with a prediction."""
    is_last = state.num_full + 1 == needed_full_steps(state, spec)
    return (
        state.is_open
        and state.phase is TrainingPhase.FULL
        and is_last
        and state.lengths.predict > 0
    )


def horizon(state: State, spec: PhasesSpec) -> int:
    """Return how many steps ahead the back-test predicts: as far as later predictions reach, if
    there are enough Full steps."""
    return max(1, min(spec.correct_every, state.lengths.predict, state.lengths.full - 2))


def forecast_due(state: State, spec: PhasesSpec) -> bool:
    """Return whether, after the open step, the back-test predicts the last Full step's gradient."""
    ahead = needed_full_steps(state, spec) - (state.num_full + 1)
    is_here = ahead == horizon(state, spec) and state.phase is TrainingPhase.FULL
    return state.is_open and is_here and state.lengths.predict > 0


def _next_phase(state: State, spec: PhasesSpec) -> TrainingPhase:
    match state.phase:
        case TrainingPhase.FULL:
            is_done = state.num_full >= needed_full_steps(state, spec)
            may_leave = is_done and state.may_predict and state.lengths.predict > 0
            return TrainingPhase.PREDICT if may_leave else TrainingPhase.FULL
        case TrainingPhase.PREDICT:
            if state.num_predicted >= state.lengths.predict:
                return TrainingPhase.FULL
            is_due = state.num_since_exact >= spec.correct_every
            return TrainingPhase.CORRECT if is_due else TrainingPhase.PREDICT
        case TrainingPhase.CORRECT:
            return TrainingPhase.PREDICT if state.may_predict else TrainingPhase.FULL
        case _:
            assert_never(state.phase)


def _is_cycle_over(state: State, spec: PhasesSpec) -> bool:
    return state.phase is not TrainingPhase.FULL or state.num_full >= needed_full_steps(state, spec)


def _next_cycle(state: State, opened: State) -> State:
    was_refused = state.phase is TrainingPhase.FULL and state.lengths.predict > 0
    return replace(
        opened,
        cycle=state.cycle + 1,
        num_full=0,
        num_predicted=0,
        may_predict=False,
        num_refused=state.num_refused + int(was_refused),
    )


def _end_full(closed: State, spec: PhasesSpec, passed: bool, may_predict: bool) -> State:
    lengths = closed.lengths
    if closed.num_since_exact and not passed:
        lengths = after_failed_check(lengths, spec)
    return replace(
        closed,
        lengths=lengths,
        num_full=closed.num_full + 1,
        num_since_exact=0,
        # Only the last Full step decides, and its check is the back-test.
        may_predict=may_predict and closed.num_full + 1 == needed_full_steps(closed, spec),
        counts=closed.counts._replace(full=closed.counts.full + 1),
    )


def _end_correct(closed: State, spec: PhasesSpec, loss: float, passed: bool) -> State:
    # A loss that jumped gives the cycle up, even where the gradient agrees.
    is_spike = closed.full_losses.recorded(loss).is_spike(spec.adaptive.window)
    may_predict = passed and not is_spike
    return replace(
        closed,
        lengths=closed.lengths if may_predict else after_failed_check(closed.lengths, spec),
        num_since_exact=0,
        may_predict=may_predict,
        num_fallbacks=closed.num_fallbacks + int(not may_predict),
        counts=closed.counts._replace(correct=closed.counts.correct + 1),
        correct_losses=closed.correct_losses.recorded(loss),
    )


# ---- Schedule as JSON ----
#
# The round trip is exact, because Python writes floats so that they read back. The text travels
# with checkpoints and to members that join, and is part of the fingerprint.


def dump_state(state: State) -> str:
    """Encode the state as compact JSON; equal states give equal texts."""
    plain = asdict(state)
    for name in ("full_losses", "correct_losses"):
        plain[name] = list(getattr(state, name).losses)
    return json.dumps(plain, separators=(",", ":"))


def load_state(text: str) -> State:
    """Decode a state from `dump_state`. Raises InvalidInputError for other texts."""
    try:
        return _read(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInputError.at("state.phases/schedule", f"is not readable: {error}") from error


def _read(plain: dict[str, Any]) -> State:
    check = plain["last_check"]
    special = {
        "lengths": Lengths(*plain["lengths"]),
        "phase": TrainingPhase(plain["phase"]),
        "counts": Counts(*plain["counts"]),
        "last_check": None if check is None else Quality(*check),
        "full_losses": _losses(plain["full_losses"]),
        "correct_losses": _losses(plain["correct_losses"]),
    }
    return State(**{**plain, **special})


def _losses(values: list[float]) -> LossHistory:
    return LossHistory(tuple(values), NUM_LOSSES)
