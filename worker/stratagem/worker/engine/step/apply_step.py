"""The end of a training step, once its gradients are reduced: the same for every kind of trainer.

A step whose loss or gradients are not finite changes nothing but the scale of the loss; any other
one becomes one update of the parameters. Must not know how gradients were made and reduced.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stratagem.common.base.errors import UserCodeError
from stratagem.common.job import JobSpec
from stratagem.common.strategy import Federated, FedYogi
from stratagem.worker.engine.numerics.prepare_model import ModelExecution
from stratagem.worker.engine.optim.finite_gradients import StepSummary
from stratagem.worker.engine.optim.learning_rate import lower_learning_rates, set_learning_rates
from stratagem.worker.engine.optim.optimizers import clip, update
from stratagem.worker.engine.optim.reported_rates import ReportedRates
from stratagem.worker.engine.optim.shadow_schedule import ShadowSchedule
from stratagem.worker.engine.optim.weight_average import WeightAverage
from stratagem.worker.engine.step.model_buffers import Buffers
from stratagem.worker.user_code.entrypoints import user_code

_SKIPPING: Final = "; accumulation.non_finite: skip_step leaves single such steps out"


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """What the steps of one model change, and the settings by which they do."""

    job: JobSpec
    execution: ModelExecution
    params: Sequence[Tensor]
    """What the optimizer updates here."""
    optimizer: torch.optim.Optimizer | None
    """None where this process holds no parameters."""
    buffers: Buffers | None
    """Restored with a step that is skipped; None for steps without a forward pass."""
    rates: ReportedRates
    average: WeightAverage | None = None
    """Takes in the parameters after each update."""
    schedule: ShadowSchedule | None = None
    """The user's; one of ours is in the factor of each step."""

    def lower_rates(self, num_reductions: int) -> None:
        """Sets the rates to those after as many reductions of a plateau, from the next step on."""
        self.rates.lower(num_reductions)
        if self.optimizer is not None:
            lower_learning_rates(self.optimizer, self.job.optimizer, num_reductions)

    def begin(self) -> None:
        """Drops the gradients of an earlier step and remembers the buffers."""
        self.drop_gradients()
        if self.buffers is not None:
            self.buffers.snapshot()

    def undo(self) -> None:
        """Drops the gradients and restores the buffers."""
        self.drop_gradients()
        if self.buffers is not None:
            self.buffers.restore()

    def drop_gradients(self) -> None:
        for param in self.params:
            param.grad = None


class Applied(NamedTuple):
    """What became of a step, and the learning rates of its update, by series."""

    is_applied: bool
    learning_rates: Mapping[str, float]


def apply_step(
    summary: StepSummary,
    policy: StepPolicy,
    *,
    lr_factor: float,
    activity: str,
    number: int | None = None,
    correct: Callable[[Tensor], Tensor] | None = None,
    share: Callable[[], bool] | None = None,
) -> Applied:
    """Makes one update with the gradients in `.grad`, unless loss or gradients are not finite: then
    the step is skipped.

    lr_factor: of all learning rates. activity and number (from 1): the step, for error messages.
    correct: is given the norm of gradients that will be applied, may change them, and returns their
    norm then. share: is called once the optimizer has updated what this member owns, and brings
    what others have updated; False where that has not come yet, so that the average waits for it.
    Raises UserCodeError for a step that is not finite and may not be skipped.
    """
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
    """Return the words for what is to be lowered, first of all."""
    strategy, server = job.strategy, ""
    if isinstance(strategy, Federated):
        if strategy.options.server_optimizer is not None:
            server = "strategy.options.server_optimizer.learning_rate"
        elif isinstance(strategy.aggregation, FedYogi):
            server = "strategy.options.server_learning_rate"
    rates = f"optimizer.lr (from round 2 on perhaps {server})" if server else "optimizer.lr"
    return f"lower {rates}, or look at the data"


def _not_finite(summary: StepSummary, *, is_clipped: bool) -> str:
    """Returns the words for what is not finite; "" when all is well.

    is_clipped: an infinite norm is then no good either, as scaling by it would erase the step.
    """
    if not math.isfinite(summary.loss):
        return "loss" if summary.weight else "loss (nothing was counted)"
    if not summary.is_finite:
        return "gradient"
    if is_clipped and not math.isfinite(summary.norm.item()):
        return "gradient norm"
    return ""
