"""The server's side of the federated reference: what becomes of the mean of a round.

Whole tensors in plain float64, written down from the papers; see `reference.federated_loop`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stratagem.common.strategy import FedAdagrad, FedAdam, FedAvgM, Federated, FedYogi

Slots = dict[str, Tensor]


def server_step(strategy: Federated, x: Tensor, mean: Tensor, slots: Slots) -> Tensor:
    """The next value of one trained parameter, in float64; keeps its slots up to date.

    x: present value. mean: float64, weighted mean of the clients. Slots are kept in float32, or
    float64 where x is.
    """
    kept = torch.float64 if x.dtype == torch.float64 else torch.float32
    delta = mean - x.double()

    def slot(name: str, first: float) -> Tensor:
        return slots.get(name, torch.full_like(delta, first)).double()

    match strategy.options.server_optimizer or strategy.aggregation:
        case FedYogi(beta1, beta2, tau):
            rate = strategy.options.server_learning_rate
            m, v = slot("m", 0.0), slot("v", tau * tau)
            m = beta1 * m + (1 - beta1) * delta
            v = v - (1 - beta2) * (delta * delta) * torch.sign(v - delta * delta)
            slots.update(m=m.to(kept), v=v.to(kept))
            return x.double() + rate * m / (torch.sqrt(v) + tau)
        case FedAdam(rate, beta1, beta2, tau):
            m, v = slot("m", 0.0), slot("v", tau * tau)
            m = beta1 * m + (1 - beta1) * delta
            v = beta2 * v + (1 - beta2) * (delta * delta)
            slots.update(m=m.to(kept), v=v.to(kept))
            return x.double() + rate * m / (torch.sqrt(v) + tau)
        case FedAdagrad(rate, tau):
            v = slot("v", tau * tau) + delta * delta
            slots.update(v=v.to(kept))
            return x.double() + rate * delta / (torch.sqrt(v) + tau)
        case FedAvgM(rate, momentum):
            m = momentum * slot("m", 0.0) + delta
            slots.update(m=m.to(kept))
            return x.double() + rate * m
        case _:
            return mean
