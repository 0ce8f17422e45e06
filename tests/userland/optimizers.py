"""Optimizers as users bring them: a class, a factory, and some whose state cannot be saved."""

from typing import Any

import torch
from torch import Tensor

Params = Any


class SignMomentum(torch.optim.Optimizer):
    """Moves by the sign of a moving average; counts its steps in its state."""

    def __init__(self, params: Params, lr: float, beta: float = 0.9, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "decay": decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["mean"], state["num_steps"] = torch.zeros_like(param), 0
                state["num_steps"] += 1
                state["mean"].lerp_(param.grad, 1 - group["beta"])
                param.mul_(1 - group["lr"] * group["decay"])
                rate = group["lr"] * (1 + 1 / state["num_steps"])
                param.add_(state["mean"].sign(), alpha=-rate)


def halves(params: Params, lr: float, **kwargs: Any) -> torch.optim.Optimizer:
    """A factory of an optimizer of torch's, without the kernels that the engine would choose."""
    return torch.optim.AdamW(params, lr=lr, foreach=False, fused=False, **kwargs)


def lion(params: Params, lr: float, **kwargs: Any) -> torch.optim.Optimizer:
    from lion_pytorch import Lion

    made: torch.optim.Optimizer = Lion(params, lr=lr, **kwargs)
    return made


class _Plain(torch.optim.Optimizer):
    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"])

    def before(self) -> None:
        pass

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.before()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.move(param, self.rate(group))

    def move(self, param: Tensor, rate: float) -> None:
        param.add_(param.grad, alpha=-rate)  # type: ignore[arg-type]


class CountsItself(_Plain):
    """Keeps its number of steps as an attribute."""

    def before(self) -> None:
        self.num_steps += 1


class CountsInGroups(_Plain):
    """Keeps its number of steps in its groups."""

    def before(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Remembers(_Plain):
    """Keeps gradients in a list."""

    def move(self, param: Tensor, rate: float) -> None:
        self.state[param].setdefault("past", []).append(param.grad)


class Noisy(_Plain):
    """Draws random numbers."""

    def move(self, param: Tensor, rate: float) -> None:
        param.add_(torch.randn_like(param), alpha=-rate)


class Hidden(_Plain):
    """Keeps what it has seen in a closure that nothing shows."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, lr)
        self.seen: list[int] = []

    def move(self, param: Tensor, rate: float) -> None:
        self.seen.append(1)
        param.sub_(rate * len(self.seen))


class Together(_Plain):
    """Moves all parameters by the norm of all gradients."""

    def before(self) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.norm = torch.stack([grad.norm() for grad in grads]).norm()

    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"]) / float(self.norm)


def nothing(params: Params, lr: float) -> object:
    return lr


def forgetful(params: Params, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[1:], lr=lr)


def two_groups(params: Params, lr: float) -> torch.optim.Optimizer:
    listed = list(params)
    groups: list[dict[str, Any]] = [{"params": listed[:1]}, {"params": listed[1:], "lr": lr / 2}]
    return torch.optim.SGD(groups, lr=lr)


def lbfgs(params: Params, lr: float) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(list(params), lr=lr)
