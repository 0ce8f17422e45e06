"""The schedule of the phases, which gives each step its phase: a pure state machine over a frozen,
JSON-able state.

`begin` opens the next step and says its phase; `end` closes it with what was seen. Between the two
the phase cannot change, however often `begin` is asked. All decisions follow from sums over the
whole batch, so replicas decide alike. Knows no tensor, no clock and no trainer.

    FULL     the gradient is computed; `full_steps` of them, then PREDICT if the back-test passed
             and the loss does not diverge
    PREDICT  the gradient is predicted; `predict_steps` of them in a cycle, then FULL
    CORRECT  one exact step after every `correct_every` predictions: PREDICT again if they were
             good, else FULL. None where the budget is used up: the FULL step that follows is exact.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple, assert_never

from stratagem.common.job.schedules import PhasesSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.phases.loss_history import LossHistory
from stratagem.worker.phases.phase_adaptation import (
    Lengths,
    adapted,
    after_failed_check,
    configured,
)

NUM_LOSSES: Final = 100
"""Kept of each phase."""


class TrainingPhase(StrEnum):
    FULL = "FULL"
    PREDICT = "PREDICT"
    CORRECT = "CORRECT"

    @property
    def is_exact(self) -> bool:
        """True if a step of this phase computes its gradient."""
        return self is not TrainingPhase.PREDICT


class Quality(NamedTuple):
    """The quality of a prediction p against the gradient a that came out: ‖a − p‖ / ‖a‖, and the
    cosine."""

    relative_error: float
    cosine: float

    def passes(self, spec: PhasesSpec) -> bool:
        is_close = self.relative_error <= spec.max_relative_error
        return is_close and self.cosine >= spec.min_correlation


class Counts(NamedTuple):
    """The number of steps that have ended, by phase."""

    full: int = 0
    predict: int = 0
    correct: int = 0

    @property
    def total(self) -> int:
        return self.full + self.predict + self.correct


NO_STEPS: Final = Counts()


@dataclass(frozen=True, slots=True)
class State:
    """The state of the schedule between two steps, or inside one when `is_open`."""

    lengths: Lengths
    """Of the present cycle; adaptation moves them."""
    phase: TrainingPhase = TrainingPhase.FULL
    """Of the open step, or of the last one."""
    is_open: bool = False
    has_changed: bool = True
    """Whether the phase of the open (or last) step differs from that of the step before."""
    num_full: int = 0
    """Full steps in this cycle that have ended."""
    num_predicted: int = 0
    """Predict steps in this cycle that have ended."""
    num_since_exact: int = 0
    """Predict steps since the last exact gradient."""
    may_predict: bool = False
    """Whether the latest check of predictions passed."""
    cycle: int = 0
    counts: Counts = NO_STEPS
    num_refused: int = 0
    """Cycles that stayed in FULL, as the back-test failed or the loss diverged."""
    num_fallbacks: int = 0
    """Corrections after which the cycle was given up."""
    last_check: Quality | None = None
    last_loss: float | None = None
    """Of the last exact step."""
    full_losses: LossHistory = field(default_factory=lambda: LossHistory(capacity=NUM_LOSSES))
    correct_losses: LossHistory = field(default_factory=lambda: LossHistory(capacity=NUM_LOSSES))

    @property
    def total_step(self) -> int:
        """Steps that have ended."""
        return self.counts.total


class PhaseError(RuntimeError):
    """Raised for a call that does not fit the phase: a defect of the caller."""


def initial(spec: PhasesSpec) -> State:
    """Returns the state before the first step, to which a reset returns too."""
    return State(configured(spec))


def begin(state: State, spec: PhasesSpec, numerics: int = CURRENT) -> State:
    """Returns the state with a step open; the same state when one is open already."""
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
    """Returns the state after the open step.

    loss: the mean over the global batch of an exact step; a predicted one has none. checks: how
    predictions of this step's gradient compare with it; see `check_due` and `back_test_due`.
    Raises PhaseError when no step is open or the arguments do not fit the phase.
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
    """Returns the number of Full steps of the present cycle; the first one is preceded by the
    warm-up."""
    return state.lengths.full + (spec.warmup_steps if state.cycle == 0 else 0)


def check_due(state: State) -> bool:
    """Returns whether the open step is the first exact one after predicted ones."""
    return state.is_open and state.phase.is_exact and state.num_since_exact > 0


def back_test_due(state: State, spec: PhasesSpec) -> bool:
    """Returns whether PREDICT may follow the open Full step, if its gradient could have been
    predicted."""
    is_last = state.num_full + 1 == needed_full_steps(state, spec)
    return (
        state.is_open
        and state.phase is TrainingPhase.FULL
        and is_last
        and state.lengths.predict > 0
    )


def horizon(state: State, spec: PhasesSpec) -> int:
    """Returns how many steps ahead the back-test predicts: as far as predictions will reach, if the
    Full steps leave room for a line before."""
    return max(1, min(spec.correct_every, state.lengths.predict, state.lengths.full - 2))


def forecast_due(state: State, spec: PhasesSpec) -> bool:
    """Returns whether the gradient of the last Full step is to be predicted from here, after the
    open step's gradient is known."""
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
