"""Server optimizers: how the mean of a round's updates moves the global parameters.

Each is a pure step over one window of elements in float64,

    (slots, delta) -> (slots, change)      x <- x + change

with delta = mean - x, elementwise, so that a fold can apply it window by window. A slot is a number
kept for every element between rounds; its first value stands in `initial`. No bias correction.
Knows nothing of files, rounds or element types.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from stratagem.common.strategy import FedAdagrad, FedAdam, FedAvgM, Federated, FedYogi
from stratagem.coordinator.updates.numpy_floats import Wide

Slots = tuple[Wide, ...]
Step = Callable[[Slots, Wide], tuple[Slots, Wide]]


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """A server optimizer: its slots per element, by name with their first value, and its step."""

    initial: Mapping[str, float]
    step: Step


def server_optimizer(strategy: Federated) -> ServerOptimizer | None:
    """Return the server optimizer of the strategy; None: the mean itself is the next state."""
    chosen = strategy.aggregation
    if isinstance(chosen, FedYogi):
        rate = strategy.options.server_learning_rate
        return fed_yogi(rate, chosen.beta1, chosen.beta2, chosen.tau)
    match strategy.options.server_optimizer:
        case FedAdam(learning_rate=rate, beta1=beta1, beta2=beta2, tau=tau):
            return fed_adam(rate, beta1, beta2, tau)
        case FedAdagrad(learning_rate=rate, tau=tau):
            return fed_adagrad(rate, tau)
        case FedAvgM(learning_rate=rate, momentum=momentum):
            return fed_avg_m(rate, momentum)
        case None:
            return None


def fed_yogi(rate: float, beta1: float, beta2: float, tau: float) -> ServerOptimizer:
    """FedYogi, https://arxiv.org/abs/2003.00295, Algorithm 2; v begins at tau² and stays >= 0."""

    def step(slots: Slots, delta: Wide) -> tuple[Slots, Wide]:
        m, v = slots
        square = delta * delta
        m = beta1 * m + (1 - beta1) * delta
        v = v - (1 - beta2) * square * np.sign(v - square)
        return (m, v), rate * m / (np.sqrt(v) + tau)

    return ServerOptimizer({"m": 0.0, "v": tau * tau}, step)


def fed_adam(rate: float, beta1: float, beta2: float, tau: float) -> ServerOptimizer:
    """FedAdam, https://arxiv.org/abs/2003.00295, Algorithm 2."""

    def step(slots: Slots, delta: Wide) -> tuple[Slots, Wide]:
        m, v = slots
        m = beta1 * m + (1 - beta1) * delta
        v = beta2 * v + (1 - beta2) * (delta * delta)
        return (m, v), rate * m / (np.sqrt(v) + tau)

    return ServerOptimizer({"m": 0.0, "v": tau * tau}, step)


def fed_adagrad(rate: float, tau: float) -> ServerOptimizer:
    """FedAdagrad, https://arxiv.org/abs/2003.00295, Algorithm 2 with beta1 = 0."""

    def step(slots: Slots, delta: Wide) -> tuple[Slots, Wide]:
        v = slots[0] + delta * delta
        return (v,), rate * delta / (np.sqrt(v) + tau)

    return ServerOptimizer({"v": tau * tau}, step)


def fed_avg_m(rate: float, momentum: float) -> ServerOptimizer:
    """FedAvgM: server momentum, https://arxiv.org/abs/1909.06335."""

    def step(slots: Slots, delta: Wide) -> tuple[Slots, Wide]:
        m = momentum * slots[0] + delta
        return (m,), rate * m

    return ServerOptimizer({"m": 0.0}, step)
