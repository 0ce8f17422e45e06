"""Learning-rate schedules: the rate of each step as a pure function of the step, with no state."""

import math
from typing import assert_never

import torch

from stratagem.common.job import OptimizerSpec, ScheduleSpec


def learning_rate(spec: OptimizerSpec, step: int, num_steps: int) -> float:
    """Returns the rate for the update that follows `step` applied ones, of `num_steps` in all."""
    if spec.schedule is None:
        return spec.lr
    return spec.lr * schedule_factor(spec.schedule, step, num_steps)


def schedule_factor(spec: ScheduleSpec, step: int, num_steps: int) -> float:
    """Returns the schedule's factor of the base rate; warm-up rises linearly and ends at 1."""
    warmup, final = spec.warmup_steps, spec.final_lr_fraction
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    match spec.name:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - final) * progress
        case "cosine":
            return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "step":
            return float(spec.gamma ** ((step - warmup) // (spec.step_size_steps or num_steps)))
        case _:
            assert_never(spec.name)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of all parameters from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
