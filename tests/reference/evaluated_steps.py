"""Training that is steered by its evaluations, as a loop: train, evaluate, decide, train on."""

from bisect import bisect_right
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.evaluation_loop import evaluation_loop
from tests.reference.loops import Result, SetRates


def stopped_loop(
    job: JobSpec, entrypoints: EntryPoints, train: Callable[[int], Result], ends: list[int]
) -> tuple[int, Mapping[str, Tensor]]:
    """(steps, state) at which the job's `evaluation.stop` ends the training, or its last ones.

    train(n): any of the loops after n steps, or rounds. ends: where the job evaluates.
    """
    assert job.evaluation is not None
    stop = job.evaluation.stop
    assert stop is not None
    name = f"{job.evaluation.split}.{stop.metric or job.evaluation.best}"
    sign = 1.0 if (stop.mode or job.evaluation.mode) == "max" else -1.0
    best, num_without = -float("inf"), 0
    for end in ends:
        state = train(end).state
        value = sign * evaluation_loop(job, entrypoints, state)[name]
        if value > best + stop.min_delta:
            best, num_without = value, 0
        else:
            num_without += 1
        if num_without == stop.patience:
            return end, state
    return ends[-1], state


def plateau_loop(
    job: JobSpec,
    entrypoints: EntryPoints,
    train: Callable[[int, SetRates], Mapping[str, Tensor]],
    ends: list[int],
) -> tuple[list[list[float]], Mapping[str, Tensor]]:
    """(the rates of every group after each evaluation, the state at the end).

    The rates are those of torch's ReduceLROnPlateau, over parameters of its own. train(n,
    set_rates): the state of any of the loops after n steps, or rounds, with these rates.
    """
    spec, evaluation = job.optimizer.plateau, job.evaluation
    assert spec is not None
    assert evaluation is not None
    full = [lr for rule in job.optimizer.rules() for lr, _ in rule.groups.values()]
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in full]
    shadow = torch.optim.SGD(groups)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        shadow,
        mode=spec.mode or evaluation.mode,
        factor=spec.factor or 0.1,
        patience=spec.num_tolerated,
        threshold=spec.min_delta or 0.0,
        threshold_mode="abs",
        cooldown=spec.cooldown or 0,
        min_lr=spec.min_lr or 0.0,
    )
    name = f"{evaluation.split}.{spec.metric or evaluation.best}"
    rates = [full]

    def set_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
        for group, rate in zip(
            optimizer.param_groups, rates[bisect_right(ends, step)], strict=True
        ):
            group["lr"] = rate

    for end in ends:
        state = train(end, set_rates)
        scheduler.step(evaluation_loop(job, entrypoints, state)[name])
        rates.append([float(group["lr"]) for group in shadow.param_groups])
    return rates, state
