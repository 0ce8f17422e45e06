"""Schedules as users bring them: functions of an optimizer and the number of steps."""

from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler


def one_cycle(optimizer: Optimizer, num_steps: int, peak: float = 3.0) -> LRScheduler:
    rates = [peak * group["lr"] for group in optimizer.param_groups]
    moved = "betas" if "betas" in optimizer.defaults else "momentum"
    return lr_scheduler.OneCycleLR(
        *(optimizer, rates, num_steps),
        pct_start=0.4,
        cycle_momentum=all(moved in group for group in optimizer.param_groups),
    )


def sequential(optimizer: Optimizer, num_steps: int) -> LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, num_steps),
        lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3, 6])


class _Inverse:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0 / (1 + step + 0.001 * self.calls)


def lambdas(optimizer: Optimizer, num_steps: int) -> LRScheduler:
    others = [lambda step: 0.9**step] * (len(optimizer.param_groups) - 1)
    return lr_scheduler.LambdaLR(optimizer, [_Inverse(), *others])


def warm_restarts(optimizer: Optimizer, num_steps: int) -> LRScheduler:
    return lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, T_mult=2, eta_min=0.001)


def chained(optimizer: Optimizer, num_steps: int) -> Any:
    parts = [
        lr_scheduler.ConstantLR(optimizer, 0.1, total_iters=4),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def multistep(optimizer: Optimizer, num_steps: int) -> LRScheduler:
    return lr_scheduler.MultiStepLR(optimizer, [2, 5, 5, 9], gamma=0.3)


def cyclic(optimizer: Optimizer, num_steps: int) -> LRScheduler:
    return lr_scheduler.CyclicLR(
        optimizer, 0.001, 0.1, step_size_up=3, mode="exp_range", gamma=0.99
    )


def plateau(optimizer: Optimizer, num_steps: int) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer)


class _Forgetful:
    """A scheduler of its own kind whose state lacks what it counts."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / self.steps

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def forgetful(optimizer: Optimizer, num_steps: int) -> Any:
    return _Forgetful(optimizer)


def nothing(optimizer: Optimizer, num_steps: int) -> Any:
    return num_steps


def kept_open(optimizer: Optimizer, num_steps: int) -> LRScheduler:
    made = lr_scheduler.ExponentialLR(optimizer, 0.9)
    made.own = object()  # type: ignore[attr-defined]
    return made
