"""Learning-rate schedules: the rate of each step as a pure function of the step, with no state."""

import math
from bisect import bisect_right

import torch

from stratagem.common.job import OptimizerSpec, ScheduleSpec


def learning_rate_factor(spec: OptimizerSpec, step: int, num_steps: int) -> float:
    """Returns the factor of all rates for the update that follows `step` applied ones, of
    `num_steps` in all."""
    if spec.schedule is None or spec.schedule.entrypoint is not None:
        return 1.0
    return schedule_factor(spec.schedule, step, num_steps)


def schedule_factor(spec: ScheduleSpec, step: int, num_steps: int) -> float:
    """Returns the schedule's factor of the base rate; warm-up rises linearly and ends at 1.

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
    """Returns the factor at a step after the warm-up, of as many."""
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
    """Returns the share of the current period of `restarts` that is over."""
    period = spec.period_steps or 1
    factor = spec.period_factor or 1
    if factor == 1:
        return step % period / period
    while step >= period:
        step, period = step - period, period * factor
    return step / period


def _one_cycle(spec: ScheduleSpec, step: int, num_steps: int) -> float:
    """Returns the factor of Smith and Topin (2018): up to the base rate, then down to the end.

    The peak is where torch's OneCycleLR has it: one step before the share of all steps.
    """
    share = 0.3 if spec.up_fraction is None else spec.up_fraction
    start = 0.04 if spec.initial_lr_fraction is None else spec.initial_lr_fraction
    peak, end = share * num_steps - 1.0, num_steps - 1.0
    if step < peak:
        return _between(start, 1.0, step / peak)
    return _between(1.0, spec.final_lr_fraction, min(1.0, (step - peak) / max(1.0, end - peak)))


def _between(start: float, end: float, share: float) -> float:
    """Returns the half wave of a cosine that leads from start (share 0) to end (share 1)."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * share))


def lower_learning_rates(
    optimizer: torch.optim.Optimizer, spec: OptimizerSpec, num_reductions: int
) -> None:
    """Lowers the rates that the schedule multiplies to those after as many reductions of a plateau,
    counted from the beginning of the training."""
    if spec.plateau is None:
        return
    for group in optimizer.param_groups:
        full = group.setdefault("full_lr", group["initial_lr"])
        group["initial_lr"] = spec.plateau.reduced(full, num_reductions)


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets the rate of each group, from the next step on, to this factor of the one it was made
    with."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
