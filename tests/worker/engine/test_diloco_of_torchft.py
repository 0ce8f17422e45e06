"""DiLoCo against the algorithm of torchft (tests/reference/torchft_diloco.py): the same losses,
step for step, where both define the same computation.

They differ, and are not compared, in four things. torchft's fragment is cut `fragment_sync_delay`
steps before the end of its part of a round and applied there; here it is cut there and applied
`overlap_steps` later. Its buckets advance by their capacity and not by what is in them, so a tensor
that does not fit is never sent: the reference averages parameter by parameter, as is its default.
Buffers of the model are averaged here and left apart there. At the end of the run all is joined
here. (The sign of the outer gradient was wrong there once, pull request 233; it is the same now.)
"""

from typing import Any

import pytest
import torch

from stratagem.common.numerics.rules import CURRENT
from stratagem.common.strategy.local_steps import fragments_of
from tests.reference.replicas import Replicas
from tests.reference.torchft_diloco import TorchftDiLoCo
from tests.worker.engine.local_replicas import local_steps_job, trainer
from tests.worker.engine.support import ALLOWED

ADAM = {"name": "adamw", "lr": 0.01}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}


def losses_of_torchft(spec: Any, lr: float, momentum: float) -> list[float]:
    options = spec.strategy.options
    replicas = Replicas(spec, ALLOWED, spec.strategy.num_replicas, CURRENT)
    places = fragments_of([param.numel() for param in replicas.params[0]], options.fragments)
    diloco = TorchftDiLoCo(
        [[[params[place] for place in each] for each in places] for params in replicas.params],
        options.local_steps,
        lr=lr,
        momentum=momentum,
        alpha=options.mixed_share,
    )
    losses = []
    for step in range(replicas.num_steps):
        taken = replicas.take_step(step)
        losses.append(taken.loss_sum / taken.weight)
        diloco.after_step()
    return losses


@pytest.mark.parametrize(
    ("num_replicas", "options", "is_exact", "optimizer"),
    [
        (2, {"local_steps": 3}, True, SGD),
        (2, {"local_steps": 4, "fragments": 2}, True, ADAM),
        (2, {"local_steps": 4, "fragments": 4}, True, SGD),
        (4, {"local_steps": 2}, False, ADAM),  # four are added in another order
        (2, {"local_steps": 4, "fragments": 2, "mix": 0.25}, False, ADAM),  # in another form
    ],
    ids=str,
)
def test_losses_are_those_of_torchft(
    num_replicas: int, options: dict[str, Any], is_exact: bool, optimizer: Any
) -> None:
    lr, momentum = 0.7, 0.9
    outer = {"name": "nesterov", "lr": lr, "momentum": momentum}
    options = dict(options)
    local_steps = options.pop("local_steps")
    spec = local_steps_job(
        "mlp", num_replicas, local_steps, optimizer=optimizer, options={"outer": outer, **options}
    )
    expected = losses_of_torchft(spec, lr, momentum)
    made, exchange = trainer(spec)
    steps = range(made.num_steps)
    found = [made.train_step(exchange, range(num_replicas), num_replicas).loss for _ in steps]
    assert len(set(expected)) > 2 * local_steps
    if is_exact:
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)
