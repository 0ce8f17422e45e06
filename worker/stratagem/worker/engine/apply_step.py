"""Apply one training step once its gradients are reduced; every kind of trainer does it here.

A step whose loss or gradients are not finite changes nothing but the scale of the loss. Any other
step becomes one update of the parameters, at the learning rate that the job's schedule gives for
the step. The module does not know how the gradients were made and reduced.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import JobSpec, OptimizerSpec, ScheduleSpec
from stratagem.common.strategy import Federated, FedYogi
from stratagem.worker.engine.buffers import Buffers
from stratagem.worker.engine.optimizers import WeightAverage, clip, update
from stratagem.worker.engine.shadow_schedule import ShadowSchedule
from stratagem.worker.exchange.layout import parts_of, total_norm
from stratagem.worker.numerics.model import ModelExecution
from stratagem.worker.user_code.entrypoints import user_code

# ---- Finite gradients ----
#
# The norm is the only pass over the gradients: the step reports it, and clipping uses it.


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Loss, weight and gradient norm of a step, known to all members before they apply it."""

    loss: float
    """Mean over `weight` rows or tokens."""
    weight: float
    norm: Tensor
    """2-norm of the whole gradient, 0-d, before clipping."""
    is_finite: bool
    """True if all elements of the gradients are finite."""


def are_finite(norm: Tensor, grads: Sequence[Tensor]) -> bool:
    """Return whether every element of the gradients is finite; `norm` is their 2-norm.

    The norm of finite gradients may overflow; only then are the elements looked at one by one.
    """
    return math.isfinite(norm.item()) or all(bool(torch.isfinite(grad).all()) for grad in grads)


def after_hook(
    summary: StepSummary, hook: Callable[[], None] | None, again: Callable[[], StepSummary]
) -> StepSummary:
    """Call the user's gradient hook, if there is one and if loss and gradients are finite; return
    the step's summary after the hook, which `again` computes."""
    if hook is None or not (summary.is_finite and math.isfinite(summary.loss)):
        return summary
    hook()
    return again()


# ---- Learning-rate schedules ----
#
# The rate of each step is a pure function of the step; a schedule has no state.


def learning_rate_factor(spec: OptimizerSpec, step: int, num_steps: int) -> float:
    """Return the factor of all learning rates after `step` updates, of `num_steps` in all."""
    if spec.schedule is None or spec.schedule.entrypoint is not None:
        return 1.0
    return schedule_factor(spec.schedule, step, num_steps)


def schedule_factor(spec: ScheduleSpec, step: int, num_steps: int) -> float:
    """Return the schedule's factor of the base learning rate; warm-up rises linearly to 1.

    Where torch.optim.lr_scheduler has the curve, the factor is that of its scheduler, except that
    `linear` and `cosine` end at `final_lr_fraction` themselves.
    """
    if spec.name == "chain":
        part, *others = spec.parts or ()
        for following in others:
            if part.steps is None or step < part.steps:
                break
            step, num_steps, part = step - part.steps, num_steps - part.steps, following
        return schedule_factor(part, step, num_steps)
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    length = num_steps if spec.steps is None else spec.steps
    return _curve(spec, step - spec.warmup_steps, max(1, length - spec.warmup_steps))


def _curve(spec: ScheduleSpec, step: int, num_steps: int) -> float:
    """Return the schedule's factor at a step after the warm-up; both counts exclude the warm-up."""
    final = spec.final_lr_fraction
    progress = min(1.0, step / num_steps)
    match spec.name:
        case "constant" | "plateau":  # the rate that it multiplies is lowered between segments
            return 1.0
        case "linear":
            return 1.0 - (1.0 - final) * progress
        case "cosine":
            return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "step":
            return float(spec.gamma ** (step // (spec.step_size_steps or num_steps)))
        case "multistep":
            return float(spec.gamma ** bisect_right(spec.milestones or (), step))
        case "exponential":
            return float(spec.gamma**step)
        case "polynomial":
            return final + (1.0 - final) * float((1.0 - progress) ** (spec.power or 1.0))
        case "restarts":
            return _between(1.0, final, _share_of_period(spec, step))
        case "onecycle":
            return _one_cycle(spec, step, num_steps)
        case _:
            raise AssertionError(f"{spec.name} is no curve")


def _share_of_period(spec: ScheduleSpec, step: int) -> float:
    """Return how much of the current period of the schedule `restarts` is over, from 0 to 1."""
    period = spec.period_steps or 1
    factor = spec.period_factor or 1
    if factor == 1:
        return step % period / period
    while step >= period:
        step, period = step - period, period * factor
    return step / period


def _one_cycle(spec: ScheduleSpec, step: int, num_steps: int) -> float:
    """Return the factor of the one-cycle schedule (Smith and Topin, 2018): up, then down.

    The peak is where torch's OneCycleLR has it: one step before the share of all steps.
    """
    share = 0.3 if spec.up_fraction is None else spec.up_fraction
    start = 0.04 if spec.initial_lr_fraction is None else spec.initial_lr_fraction
    peak, end = share * num_steps - 1.0, num_steps - 1.0
    if step < peak:
        return _between(start, 1.0, step / peak)
    return _between(1.0, spec.final_lr_fraction, min(1.0, (step - peak) / max(1.0, end - peak)))


def _between(start: float, end: float, share: float) -> float:
    """Interpolate along half a cosine wave from `start` (share 0) to `end` (share 1)."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * share))


def lower_learning_rates(
    optimizer: torch.optim.Optimizer, spec: OptimizerSpec, num_reductions: int
) -> None:
    """Set the scheduled learning rates to their values after `num_reductions` plateau reductions,
    counted from the beginning of the training."""
    if spec.plateau is None:
        return
    for group in optimizer.param_groups:
        full = group.setdefault("full_lr", group["initial_lr"])
        group["initial_lr"] = spec.plateau.reduced(full, num_reductions)


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of each parameter group to `factor` times its initial rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


# ---- Reported learning rates ----
#
# The series is `train.lr`; with groups it is `train.lr.<group>`, of which one is `default`; with
# turns it is `train.lr.<turn>` and `train.lr.<turn>.<group>`. The rates follow from the job and the
# step alone, so all members of a party report the same ones, also members that hold no parameter of
# a group.

SERIES: Final = "train.lr"


class ReportedRates:
    """Learning rates of one optimizer's updates, for reports. Used by one thread.

    If a user's optimizer makes its parameter groups itself, the reported rate is the one in the
    job.
    """

    def __init__(self, spec: OptimizerSpec | None, turn: str = "") -> None:
        """Take the rates of an optimizer. spec: None if nothing is trained. turn: the turn of a
        step that the optimizer makes."""
        rules = () if spec is None else spec.rules()
        groups = {name: lr for rule in rules for name, (lr, _) in rule.groups.items()}
        stem = f"{SERIES}.{turn}" if turn else SERIES
        is_grouped = spec is not None and spec.groups
        self._names = {group: f"{stem}.{group}" if is_grouped else stem for group in groups}
        self._plateau = None if spec is None else spec.plateau
        self._full = {self._names[group]: lr for group, lr in groups.items()}
        self._current = self._full

    def lower(self, num_reductions: int) -> None:
        """Use the rates after `num_reductions` plateau reductions from the next update on."""
        if (plateau := self._plateau) is not None:
            self._current = {
                name: plateau.reduced(lr, num_reductions) for name, lr in self._full.items()
            }

    def of_update(self, factor: float, schedule: ShadowSchedule | None = None) -> dict[str, float]:
        """Return the learning rates of the next update, keyed by series.

        factor: the factor of the built-in schedule. schedule: the user's schedule, which sets the
        rates instead of the factor if there is one.
        """
        if schedule is not None:
            rates = schedule.learning_rates()
            return {name: rates[group] for group, name in self._names.items()}
        return {name: lr * factor for name, lr in self._current.items()}


# ---- Apply a step ----

_SKIPPING: Final = "; accumulation.non_finite: skip_step leaves single such steps out"


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """The tensors that the steps of one model change, with the optimizer and all settings."""

    job: JobSpec
    execution: ModelExecution
    params: Sequence[Tensor]
    """The parameters that the optimizer updates in this process."""
    optimizer: torch.optim.Optimizer | None
    """None if this process holds no parameters."""
    buffers: Buffers | None
    """The buffers, restored if the step is skipped; None for steps without a forward pass."""
    rates: ReportedRates
    numerics: int
    """Version of the rules that fix results bit for bit; see stratagem.common.numerics.rules."""
    num_steps: int
    """The length of a learning-rate schedule: steps of the whole job, or rounds of clients."""
    average: WeightAverage | None = None
    """The running average of the weights, updated after each step."""
    schedule: ShadowSchedule | None = None
    """The user's learning-rate schedule; a built-in one is in `StepPlace.lr_factor`."""

    def lower_rates(self, num_reductions: int) -> None:
        """Set the learning rates to their values after `num_reductions` plateau reductions."""
        self.rates.lower(num_reductions)
        if self.optimizer is not None:
            lower_learning_rates(self.optimizer, self.job.optimizer, num_reductions)

    def begin(self) -> None:
        """Begin a step: drop the gradients of an earlier one and remember the buffers."""
        self.drop_gradients()
        if self.buffers is not None:
            self.buffers.snapshot()

    def undo(self) -> None:
        """Undo a step that was not applied: drop its gradients and restore the buffers."""
        self.drop_gradients()
        if self.buffers is not None:
            self.buffers.restore()

    def drop_gradients(self) -> None:
        for param in self.params:
            param.grad = None

    def summarize(
        self,
        loss: float,
        weight: float,
        norms: Sequence[Tensor] | None = None,
        *,
        is_spoiled: bool = False,
    ) -> StepSummary:
        """Summarize a step whose gradients are in `.grad`. norms: the result of `parts_of` for
        these, if known. is_spoiled: the gradients are known not to be finite."""
        grads = [param.grad for param in self.params if param.grad is not None]
        norm = total_norm(parts_of(grads, self.numerics) if norms is None else norms, self.numerics)
        return StepSummary(loss, weight, norm, not is_spoiled and are_finite(norm, grads))


class StepPlace(NamedTuple):
    """The position of a step in a training, with its learning-rate factor."""

    lr_factor: float
    """The schedule's factor of all learning rates."""
    activity: str
    """The name of the step in error messages."""
    number: int | None = None
    """The number of the step, from 1; None if messages are to name no number."""


def place_of(policy: StepPolicy, step: int) -> StepPlace:
    """Return the position of the step that follows `step` applied ones."""
    lr_factor = learning_rate_factor(policy.job.optimizer, step, policy.num_steps)
    return StepPlace(lr_factor, f"training step {step + 1}", step + 1)


class Applied(NamedTuple):
    """The outcome of a step: whether it was applied, and what to report about it."""

    is_applied: bool
    learning_rates: Mapping[str, float]
    """The learning rates of the update, keyed by series."""
    phase: str = ""
    """The name of the training phase; empty without phase training."""
    news: Sequence[str] = ()
    """Sentences for the run's log about the training phases."""
    is_torn: bool = False
    """True if this member lacks the parameters that other members have updated in this step."""


def apply_step(
    summary: StepSummary,
    policy: StepPolicy,
    place: StepPlace,
    *,
    correct: Callable[[Tensor], Tensor] | None = None,
    share: Callable[[], bool] | None = None,
) -> Applied:
    """Make one update with the gradients in `.grad`; skip the step if loss or gradients are not
    finite.

    correct: gets the norm of the gradients, may change them, and returns their new norm. share:
    called after the optimizer's update, to fetch the parameters that other members have updated; it
    returns False if they have not come, and the weight average then waits for them. Raises
    UserCodeError for a step that is not finite and may not be skipped.
    """
    lr_factor, activity, number = place
    rates = policy.rates.of_update(lr_factor, policy.schedule)
    scale, clip_norm = policy.execution.scale, policy.job.optimizer.clip_norm
    what = _not_finite(summary, is_clipped=clip_norm is not None)
    if what:
        policy.undo()
        if not (scale.absorbs(what) or policy.job.window.may_skip):
            where, skipping = ("", "") if number is None else (f" at step {number}", _SKIPPING)
            text = f"non-finite {what}{where}; {_cure(policy.job)}{skipping}"
            raise UserCodeError("FloatingPointError", text, activity=activity)
        return Applied(False, rates)
    scale.keep()
    norm = summary.norm if correct is None else correct(summary.norm)
    if policy.optimizer is not None:
        set_learning_rates(policy.optimizer, lr_factor)
        if policy.schedule is not None:
            policy.schedule.set_values(policy.optimizer)
        clip(policy.params, clip_norm, norm)
        with user_code(activity):
            update(policy.optimizer)
    is_whole = share is None or share()
    if policy.schedule is not None:
        policy.schedule.step()
    if policy.average is not None and number is not None and is_whole:
        policy.average.update(number)
    if policy.execution.frees_gradients:
        policy.drop_gradients()
    return Applied(True, rates)


def _cure(job: JobSpec) -> str:
    """Return advice on which setting to lower after a step that is not finite."""
    strategy, server = job.strategy, ""
    if isinstance(strategy, Federated):
        if strategy.options.server_optimizer is not None:
            server = "strategy.options.server_optimizer.learning_rate"
        elif isinstance(strategy.aggregation, FedYogi):
            server = "strategy.options.server_learning_rate"
    rates = f"optimizer.lr (from round 2 on perhaps {server})" if server else "optimizer.lr"
    return f"lower {rates}, or look at the data"


def _not_finite(summary: StepSummary, *, is_clipped: bool) -> str:
    """Return a phrase that names what is not finite; "" if all is finite. is_clipped: an infinite
    norm counts too, since clipping by it would set the gradients to zero."""
    if not math.isfinite(summary.loss):
        return "loss" if summary.weight else "loss (nothing was counted)"
    if not summary.is_finite:
        return "gradient"
    if is_clipped and not math.isfinite(summary.norm.item()):
        return "gradient norm"
    return ""
