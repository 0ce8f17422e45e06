"""Phase training combines schedule and gradient history for a trainer, and saves both.

`phase` says what the next step is. After an exact step the trainer hands over its gradients
(`take`), for a predicted one it gets them (`predict`); the call that does not fit is an error.
Nothing changes before one of the two succeeds, so a step that failed can be done again. The trainer
guarantees that replicas see the same sums, and `checksum` lets it check that.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job.schedules import PhasesSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.worker.phases import schedule
from stratagem.worker.phases.prediction import (
    MAX_RELATIVE_ERROR,
    GradientHistory,
    flat_dtype,
    quality,
)
from stratagem.worker.phases.schedule import (
    DIVERGENCE_SHARE,
    FALL_SHARE,
    NO_STEPS,
    Counts,
    PhaseError,
    Quality,
    State,
    TrainingPhase,
    dump_state,
    load_state,
    mean,
)

# ---- Phase statistics ----
#
# Three units measure the savings. The step ratio is all steps per step with a gradient; it counts a
# predicted step as free. The cost model is T·(f+b) / (B·(f+b) + P·p) for T steps, B of them exact
# with f and b seconds forward and backward, P predicted with p seconds each. (With a forward pass
# in each predicted step p would be f; here a predicted step reads no data, so p is the prediction
# itself.) The wall time is T·(mean seconds of an exact step) / (seconds of all steps), exchange and
# update included. All three compare with as many steps without phases; only a run without phases
# can show whether fewer steps would have reached the same loss.


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds measured in this process since it loaded its state, as sums over `counts` steps."""

    counts: Counts = NO_STEPS
    forward: float = 0.0
    backward: float = 0.0
    exact: float = 0.0
    """Duration of Full and Correct steps."""
    predicted: float = 0.0
    """Duration of Predict steps."""

    def with_exact(
        self, phase: TrainingPhase, *, forward: float, backward: float, whole: float
    ) -> "Seconds":
        """Return the sums with the times of one more exact step, which computed its gradient."""
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
        """Return the sums including one more Predict step."""
        counts = self.counts._replace(predict=self.counts.predict + 1)
        return replace(self, counts=counts, predicted=self.predicted + whole)

    @property
    def cost_speedup(self) -> float:
        """The speed-up by phase training according to the cost model."""
        passes = self.forward + self.backward
        return _speedup(self.counts, passes, self.predicted)

    @property
    def wall_speedup(self) -> float:
        """The speed-up by phase training according to the clock."""
        return _speedup(self.counts, self.exact, self.predicted)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a run so far. `average_losses` lacks phases without a loss, such as PREDICT."""

    counts: Counts
    cycles: int
    full_steps: int
    """The present number of Full steps per cycle."""
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
    """Return the number of steps per exact step; 1 before the first step."""
    return counts.total / max(counts.full + counts.correct, 1) if counts.total else 1.0


def statistics_of(state: State) -> Statistics:
    """Return the statistics of a state, equal on all replicas."""
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
    """Return the trends of the losses of FULL steps, by name, equal on all replicas.

    A trend is left out while there are too few losses for it.
    """
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
    """Return a sentence for the log if the loss has begun to diverge, or has settled; else ""."""
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


# ---- Phase training ----

PREFIX: Final = "phases/"
_GRADIENT: Final = f"{PREFIX}gradient/"
_FORECAST: Final = f"{PREFIX}forecast"
_REACHED: Final = f"{PREFIX}reached"
_SCHEDULE: Final = f"{PREFIX}schedule"
_HISTORY: Final = f"{PREFIX}history"

NamedParams = Sequence[tuple[str, nn.Parameter]]


class PhaseTraining:
    """Schedule, gradient history and statistics of one replica. Used by one thread."""

    def __init__(self, spec: PhasesSpec, params: NamedParams, numerics: int = CURRENT) -> None:
        self._spec, self._numerics = spec, numerics
        self._params = [param for _, param in params]
        self._sizes = [param.numel() for param in self._params]
        self._dtype = flat_dtype([param.dtype for param in self._params])
        self._layout = _layout_digest(params)
        self._scratch: list[Tensor] = []
        self._news: list[str] = []
        self.seconds = Seconds()
        self.reset()

    def reset(self) -> None:
        """Forget all losses and gradients, and return to the configured lengths of cycles."""
        self._state: State = schedule.initial(self._spec)
        self._history = GradientHistory(self._spec.predictor, self._spec.trust)
        self._forecast: tuple[int, Tensor] | None = None
        self._reached = [True] * len(self._params)
        self.seconds = Seconds()

    @property
    def phase(self) -> TrainingPhase:
        """The phase of the next step; it does not change until the step ends."""
        return self._opened.phase

    @property
    def is_check_due(self) -> bool:
        """True if the next step must check predictions, as the first exact step after some."""
        return schedule.check_due(self._opened)

    @property
    def last_loss(self) -> float:
        """The loss of the last exact step; NaN before the first."""
        loss = self._state.last_loss
        return math.nan if loss is None else loss

    @property
    def statistics(self) -> Statistics:
        return statistics_of(self._state)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the phases, for display; the speed-ups cover this process only."""
        return {
            "step_ratio": self.statistics.step_ratio,
            "cost_speedup": self.seconds.cost_speedup,
            "wall_speedup": self.seconds.wall_speedup,
            "predicted_steps": float(self._state.counts.predict),
            **trends_of(self._state, self._spec, self._numerics),
        }

    def take_news(self) -> list[str]:
        """Return the sentences for the log that are new since the last call."""
        news, self._news = self._news, []
        return news

    def take(self, gradients: Sequence[Tensor | None], loss: float) -> None:
        """End an exact step, possibly correcting its gradients in place.

        gradients: per parameter the mean over the global batch, before clipping, None if no row
        reached it. loss: mean over the batch. In a correction after good predictions,
        correction_weight · (exact − predicted) is added. Raises PhaseError in a Predict step,
        ValueError if parameters are missing or have another shape.
        """
        opened, step = self._opened, self._state.total_step
        if not opened.phase.is_exact:
            raise PhaseError("a PREDICT step computes no gradient")
        exact = self._flat(gradients)
        checks: list[Quality] = []
        if schedule.check_due(opened) or schedule.back_test_due(opened, self._spec):
            predicted = self._history.predict(step) if self._history.steps else None
            checks.append(_compared(exact, predicted))
            if opened.phase is TrainingPhase.CORRECT and predicted is not None:
                self._correct(gradients, exact, predicted, checks[0])
        if schedule.back_test_due(opened, self._spec):
            forecast = self._forecast
            is_for_this = forecast is not None and forecast[0] == step
            checks.append(_compared(exact, forecast[1] if forecast and is_for_this else None))
        closed = schedule.end(opened, self._spec, loss, tuple(checks), self._numerics)
        self._history.record(step, exact)
        if schedule.forecast_due(opened, self._spec):
            target = step + schedule.horizon(opened, self._spec)
            self._forecast = (target, self._history.predict(target))
        self._reached = [gradient is not None for gradient in gradients]
        if news := news_of(self._state, closed, self._spec, self._numerics):
            self._news.append(news)
        self._state = closed

    def predict(self) -> list[Tensor | None]:
        """Return the predicted gradient of each parameter, as new tensors; None if the last exact
        step had none. Call `end_predicted` after the update."""
        if self._opened.phase.is_exact:
            raise PhaseError(f"a {self._opened.phase} step computes its gradient")
        flat = self._history.predict(self._state.total_step)
        if not self._scratch:
            # Not slices of the flat gradient: an optimizer's bits may depend on alignment.
            self._scratch = [torch.empty_like(param) for param in self._params]
        self._spread(flat, self._scratch)
        pairs = zip(self._scratch, self._reached, strict=True)
        return [gradient if reached else None for gradient, reached in pairs]

    def end_predicted(self) -> None:
        """End the open Predict step, after its update."""
        self._state = schedule.end(self._opened, self._spec)

    def state(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return (live tensors by name, metadata) on which later steps depend."""
        named = enumerate(self._history.gradients)
        tensors = {f"{_GRADIENT}{index}": gradient for index, gradient in named}
        tensors[_REACHED] = torch.tensor(self._reached)
        if self._forecast is not None:
            tensors[_FORECAST] = self._forecast[1]
        history = {
            "layout": self._layout,
            "steps": self._history.steps,
            "forecast": None if self._forecast is None else self._forecast[0],
        }
        return tensors, {_SCHEDULE: dump_state(self._state), _HISTORY: json.dumps(history)}

    def load(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Load the result of `state`; start over if it is from a job without phases."""
        self.reset()
        if _SCHEDULE not in metadata:
            return
        state, history = load_state(metadata[_SCHEDULE]), json.loads(metadata[_HISTORY])
        if history["layout"] != self._layout:
            raise InvalidInputError.at(
                "state.phases/history", "is of parameters with other names, shapes or dtypes"
            )
        names = [f"{_GRADIENT}{index}" for index in range(len(history["steps"]))]
        self._history.replace(history["steps"], [self._copy_of(tensors[name]) for name in names])
        if history["forecast"] is not None:
            self._forecast = (history["forecast"], self._copy_of(tensors[_FORECAST]))
        self._reached = tensors[_REACHED].tolist()
        self._state = state

    @property
    def _opened(self) -> State:
        return schedule.begin(self._state, self._spec, self._numerics)

    def _copy_of(self, source: Tensor) -> Tensor:
        """Return a copy on the parameters' device, in storage allocated by torch."""
        return torch.empty_like(source, device=self._params[0].device).copy_(source)

    def _correct(
        self,
        gradients: Sequence[Tensor | None],
        exact: Tensor,
        predicted: Tensor,
        measured: Quality,
    ) -> None:
        """Add the correction to the gradients, if the prediction was good."""
        weight = self._spec.correction_weight
        if weight and measured.passes(self._spec):
            self._spread(exact + (exact - predicted) * weight, gradients)

    def _flat(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return all gradients as one vector (N,), with zeros for missing ones."""
        if len(gradients) != len(self._params):
            raise ValueError(f"{len(gradients)} gradients for {len(self._params)} parameters")
        parts = []
        for index, (gradient, param) in enumerate(zip(gradients, self._params, strict=True)):
            if gradient is not None and gradient.shape != param.shape:
                raise ValueError(
                    f"gradient {index} is {tuple(gradient.shape)}, its parameter "
                    f"{tuple(param.shape)}"
                )
            source = torch.zeros_like(param) if gradient is None else gradient
            parts.append(source.detach().reshape(-1).to(self._dtype))
        return torch.cat(parts)

    def _spread(self, flat: Tensor, targets: Sequence[Tensor | None]) -> None:
        for part, target in zip(flat.split_with_sizes(self._sizes), targets, strict=True):
            if target is not None:
                target.copy_(part.view(target.shape))


def _compared(exact: Tensor, predicted: Tensor | None) -> Quality:
    return Quality(MAX_RELATIVE_ERROR, 0.0) if predicted is None else quality(exact, predicted)


def _layout_digest(params: NamedParams) -> str:
    lines = [f"{name} {param.dtype} {tuple(param.shape)}" for name, param in params]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# ---- Step timer ----
#
# The timer is the only part of phase training with a clock.


class PassTimer:
    """Measures the seconds of each step, and reports them to the phases."""

    def __init__(self, device: torch.device) -> None:
        """Begin without times. device: the device, which is synchronised where that is needed to
        tell forward from backward."""
        self._device = device
        self._is_backward = False
        self._step_began_s = self._mark_s = 0.0
        self._forward_s = self._backward_s = 0.0

    def begin_step(self) -> None:
        """Start measuring a step."""
        self._step_began_s = time.perf_counter()
        self._forward_s = self._backward_s = 0.0

    def begin_passes(self) -> None:
        """Start measuring a shard's passes: forward and backward in turn, once per micro-batch."""
        self._mark_s = time.perf_counter()
        self._is_backward = False

    def turn(self, *, to_backward: bool) -> None:
        """End a pass and add its seconds. to_backward: a backward pass comes next."""
        if to_backward and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now_s = time.perf_counter()
        if self._is_backward:
            self._backward_s += now_s - self._mark_s
        else:
            self._forward_s += now_s - self._mark_s
        self._mark_s, self._is_backward = now_s, to_backward

    def end_exact_step(self, phases: PhaseTraining, phase: str) -> None:
        """Add the seconds of an exact step to those of the phases."""
        phases.seconds = phases.seconds.with_exact(
            TrainingPhase(phase),
            forward=self._forward_s,
            backward=self._backward_s,
            whole=time.perf_counter() - self._step_began_s,
        )

    def end_predicted_step(self, phases: PhaseTraining) -> None:
        """Add the seconds of a predicted step to those of the phases."""
        phases.seconds = phases.seconds.with_predicted(time.perf_counter() - self._step_began_s)
