"""DiLoCo beside the implementation of torchft: the same losses in each step."""

from typing import Any

import pytest
import torch
from torch import nn

from stratagem.common.numerics.numerics_rules import CURRENT
from tests.reference.replicas import Replicas
from tests.worker.engine.local_replicas import local_steps_job, trainer
from tests.worker.engine.support import ALLOWED

ADAM: dict[str, Any] = {"name": "adamw", "lr": 0.01}


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["as it is meant", "as it once was"])
def test_losses_per_step_are_those_of_torchft(sign: float) -> None:
    """Its algorithm, rewritten from torchft/local_sgd.py at commit 7b396658: replicas keep a backup
    of the parameters; every so many steps the pseudogradient is averaged, the backup restored, and
    an outer optimizer of torch steps. There the pseudogradient is own - backup, which climbs; what
    is meant, and was put right in its pull request 233, is backup - own."""
    outer = {"name": "nesterov", "lr": 0.7, "momentum": 0.9}
    spec = local_steps_job("mlp", 4, 5, optimizer=ADAM, steps=40, options={"outer": outer})
    replicas = Replicas(spec, ALLOWED, 4, CURRENT)
    backup = [param.detach().clone() for param in replicas.params[0]]
    shared = [nn.Parameter(tensor) for tensor in backup]
    optimizer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    theirs: list[float] = []
    for step in range(40):
        taken = replicas.take_step(step)
        theirs.append(taken.loss_sum / taken.weight)
        if (step + 1) % 5:
            continue
        with torch.no_grad():
            for place, param in enumerate(shared):
                moved = [backup[place] - own[place] for own in replicas.params]
                param.grad = sign * torch.stack(moved).mean(0)
            optimizer.step()
            backup = [param.detach().clone() for param in shared]
            for own in replicas.params:
                for param, restored in zip(own, backup, strict=True):
                    param.copy_(restored)
    made, exchange = trainer(spec)
    ours = [made.train_step(exchange, range(4), 4).loss for _ in range(40)]
    if sign > 0:
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert ours[-1] < ours[0]
    else:
        assert theirs[-1] > 2 * ours[-1]
