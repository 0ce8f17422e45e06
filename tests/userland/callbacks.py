"""Callbacks as users write them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Noisy:
    """Noise in the first layer, in a forward pass and in the gradients, from every generator."""

    def on_build(self, model: nn.Module) -> None:
        self.model = model
        first = next(module for module in model.modules() if isinstance(module, nn.Linear))
        first.register_forward_hook(lambda _module, _args, output: output + self._noise(output))

    def _noise(self, like: Tensor) -> Tensor:
        return torch.rand_like(like) * 0.01 * float(np.random.rand())

    def on_gradients(self, named: dict[str, Tensor], step: int) -> None:
        for number, gradient in enumerate(named.values()):
            gradient.add_(torch.randn_like(gradient), alpha=0.01 * step).mul_(1.0 + 0.1 * number)


class Shifted:
    """A hook on a module alone."""

    def on_build(self, model: nn.Module) -> None:
        *_, last = (module for module in model.modules() if isinstance(module, nn.Linear))
        last.register_forward_hook(lambda _module, _args, output: output.sin())


class StopsAt:
    """Ends the training after a step, and logs what it has seen of it."""

    step = 5

    def on_step(self, view: Any) -> None:
        view.log("seen.loss", view.loss + view.grad_norm)
        if view.step % 3 == 1:  # the latest step says nothing of it
            view.log("third.loss", 2.0 * view.loss)
        if view.step == self.step:
            view.stop()


class WatchesEvaluations:
    """Logs what it sees of evaluations, and prints each of them."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_evaluation(self, view: Any) -> None:
        self.steps.append(view.step)
        print(f"evaluated {view.split} after {view.step}: {sorted(view.metrics)}")
        view.log("step", view.step)
        view.log("twice", 2.0 * view.metrics["loss"])
        view.log("so.far", len(self.steps))


class StopsAfterEvaluations(WatchesEvaluations):
    def on_evaluation(self, view: Any) -> None:
        super().on_evaluation(view)
        if view.step == 4:
            view.stop()


class StopsWithASegment(StopsAt):
    step = 6


class LogsEvaluations:
    def on_evaluation(self, view: Any) -> None:
        view.log("accuracy", 100.0 * view.metrics["accuracy"])


class StopsLate(LogsEvaluations, StopsAt):
    step = 11


class Logs:
    """Logs what it has seen of each step, and of some steps something more."""

    def on_step(self, view: Any) -> None:
        view.log("seen.loss", view.loss + view.grad_norm)
        if view.step % 3 == 1:
            view.log("third.loss", 2.0 * view.loss)


class EndsRounds:
    """Ends a client's round with its second step, and logs the loss of each."""

    def on_step(self, view: Any) -> None:
        view.log("seen.loss", view.loss)
        if view.step == 2:
            view.stop()


class Misspelt:
    def on_gradient(self, named: dict[str, Tensor], step: int) -> None:
        """No hook."""


class Broken:
    def on_gradients(self, named: dict[str, Tensor], step: int) -> None:
        if step == 3:
            raise LookupError("no such layer")


class Grows:
    def on_build(self, model: nn.Module) -> None:
        model.register_parameter("more", nn.Parameter(torch.zeros(1)))


class Exploding:
    """Makes the gradient of step 2 infinite."""

    def on_gradients(self, named: dict[str, Tensor], step: int) -> None:
        if step == 2:
            next(iter(named.values())).fill_(torch.inf)


def nothing() -> Any:
    return object()
