"""Statistics of what phase training has saved, in three units. Pure: seconds come in as arguments.

step ratio: all steps per step with a gradient. It counts a predicted step as free.
cost model: T·(f+b) / (B·(f+b) + P·p) for T steps, B of them exact with f and b seconds forward and
backward, P predicted with p seconds each. (With a forward pass in each predicted step p would be
f; here a predicted step reads no data, so p is the prediction itself.)
wall time: T·(mean seconds of an exact step) / (seconds of all steps), exchange and update included.
All three compare with as many steps without phases; whether fewer steps would have reached the same
loss only a run without phases can show.
"""

from dataclasses import dataclass, replace

from stratagem.common.job.schedules import PhasesSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.phases.loss_history import DIVERGENCE_SHARE, mean
from stratagem.worker.phases.phase_adaptation import FALL_SHARE
from stratagem.worker.phases.phase_schedule import NO_STEPS, Counts, State, TrainingPhase


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds measured in this process since it loaded its state; sums over `counts` steps."""

    counts: Counts = NO_STEPS
    forward: float = 0.0
    backward: float = 0.0
    exact: float = 0.0
    """Whole Full and Correct steps."""
    predicted: float = 0.0
    """Whole Predict steps."""

    def with_exact(
        self, phase: TrainingPhase, *, forward: float, backward: float, whole: float
    ) -> "Seconds":
        """Returns the sums with one more exact step."""
        full, predict, correct = self.counts
        counts = Counts(
            full + (phase is TrainingPhase.FULL),
            predict,
            correct + (phase is TrainingPhase.CORRECT),
        )
        return replace(
            self,
            counts=counts,
            forward=self.forward + forward,
            backward=self.backward + backward,
            exact=self.exact + whole,
        )

    def with_predicted(self, whole: float) -> "Seconds":
        """Returns the sums with one more Predict step."""
        counts = self.counts._replace(predict=self.counts.predict + 1)
        return replace(self, counts=counts, predicted=self.predicted + whole)

    @property
    def cost_speedup(self) -> float:
        """The speed-up by the cost model."""
        passes = self.forward + self.backward
        return _speedup(self.counts, passes, self.predicted)

    @property
    def wall_speedup(self) -> float:
        """The speed-up by the clock."""
        return _speedup(self.counts, self.exact, self.predicted)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a run so far. `average_losses` lacks the phases without a loss; PREDICT never
    has one."""

    counts: Counts
    cycles: int
    full_steps: int
    """Present length of the phase."""
    predict_steps: int
    num_refused: int
    num_fallbacks: int
    average_losses: dict[TrainingPhase, float]

    @property
    def step_ratio(self) -> float:
        return step_ratio(self.counts)

    def __str__(self) -> str:
        counts = self.counts
        return (
            f"{counts.total} steps | {self.cycles} cycles | {self.step_ratio:.2f}x | "
            f"{counts.full} full | {counts.predict} predict | {counts.correct} correct"
        )


def step_ratio(counts: Counts) -> float:
    """Returns all steps per exact one; 1 before the first step."""
    return counts.total / max(counts.full + counts.correct, 1) if counts.total else 1.0


def statistics_of(state: State) -> Statistics:
    """Returns the statistics of a state, which are the same on all replicas."""
    histories = {TrainingPhase.FULL: state.full_losses, TrainingPhase.CORRECT: state.correct_losses}
    return Statistics(
        counts=state.counts,
        cycles=state.cycle,
        full_steps=state.lengths.full,
        predict_steps=state.lengths.predict,
        num_refused=state.num_refused,
        num_fallbacks=state.num_fallbacks,
        average_losses={
            phase: mean(history.losses) for phase, history in histories.items() if history.losses
        },
    )


def trends_of(state: State, spec: PhasesSpec, numerics: int = CURRENT) -> dict[str, float]:
    """Returns the trends of the losses of FULL steps, by name; the same on all replicas. A trend
    that takes more losses than there are is absent."""
    losses, window = state.full_losses, spec.adaptive.window
    trends = {
        "full_loss": losses.rolling_average(window),
        "full_loss_change": losses.improvement_rate(),
    }
    return {
        **{name: value for name, value in trends.items() if value is not None},
        "is_converging": float(losses.is_converging(FALL_SHARE)),
        "is_diverging": float(losses.is_diverging(window, numerics)),
        "refused_cycles": float(state.num_refused),
        "phase_fallbacks": float(state.num_fallbacks),
    }


def news_of(before: State, after: State, spec: PhasesSpec, numerics: int = CURRENT) -> str:
    """Returns a sentence for people when the loss has begun to diverge, or has settled; ""
    otherwise."""
    if before.full_losses is after.full_losses:
        return ""
    window = spec.adaptive.window
    was = before.full_losses.is_diverging(window, numerics)
    rise = after.full_losses.rise(window, DIVERGENCE_SHARE, numerics)
    if was == (rise is not None):
        return ""
    step = after.total_step
    if rise is None:
        return f"phases: at step {step} the loss of FULL steps diverges no more"
    window, change = rise
    return (
        f"phases: at step {step} the mean loss of the last {window} FULL steps is {change:.0%} "
        f"above that of the {window} before; no gradient is predicted until it settles"
    )


def _speedup(counts: Counts, exact_s: float, predicted_s: float) -> float:
    num_exact = counts.full + counts.correct
    spent_s = exact_s + predicted_s
    return counts.total * (exact_s / num_exact) / spent_s if num_exact and spent_s else 1.0
