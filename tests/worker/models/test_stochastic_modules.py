"""Python's and NumPy's generators are seeded wherever code of the user's might draw from them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize

from stratagem.worker.engine.forward_backward import Start
from stratagem.worker.models.program import runs_only_known_code
from tests.jobs import job
from tests.worker.engine.support import train, trainer_of


def layers(*changes: Callable[[nn.Linear], object]) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.GELU(), nn.LSTM(3, 3)
    )
    for change in changes:
        change(model[0])  # type: ignore[arg-type]
    return model


class Own(nn.Linear):
    pass


class OwnTensor(Tensor):
    pass


def noise(*_: Any) -> None:
    random.random()


def put_forward(layer: nn.Linear) -> None:
    layer.forward = layer.forward  # type: ignore[method-assign]


def put_tensor(layer: nn.Linear) -> None:
    layer.register_buffer("own", torch.zeros(1).as_subclass(OwnTensor))


UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "a class": lambda: nn.Sequential(Own(3, 3)),
    "a parametrization": lambda: layers(
        lambda layer: parametrize.register_parametrization(layer, "weight", Own(3, 3))
    ),
    "torch's own parametrization": lambda: layers(parametrizations.weight_norm),
    "a hook": lambda: layers(lambda layer: layer.register_forward_hook(noise)),
    "a hook before": lambda: layers(lambda layer: layer.register_forward_pre_hook(noise)),
    "a hook of backward": lambda: layers(lambda layer: layer.register_full_backward_hook(noise)),
    "a hook of a parameter": lambda: layers(lambda layer: layer.weight.register_hook(noise)),
    "a hook of a gradient": lambda: layers(
        lambda layer: layer.weight.register_post_accumulate_grad_hook(noise)
    ),
    "a function": lambda: nn.TransformerEncoderLayer(
        4, 2, activation=lambda x: x * random.random()
    ),
    "a method": lambda: layers(put_forward),
    "a tensor": lambda: layers(put_tensor),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_may_be_the_users_is_not_known(what: str) -> None:
    assert not runs_only_known_code(UNKNOWN[what]())
    assert runs_only_known_code(layers())


def test_torch_is_not_known_while_there_are_hooks_for_all() -> None:
    handle = register_module_forward_hook(noise)
    try:
        assert not runs_only_known_code(layers())
    finally:
        handle.remove()


def drawn_by_a_step(**changes: Any) -> tuple[float, float]:
    """What is drawn after the passes of a step, whatever came before it."""
    trainer = trainer_of(job(**changes))
    random.seed(1)
    np.random.seed(1)
    train(trainer, 1, 1)
    return random.random(), np.random.rand()


def test_a_step_without_users_code_leaves_their_generators_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    untouched = random.random(), np.random.rand()
    assert drawn_by_a_step() == untouched
    seeded = [
        drawn_by_a_step(model="everything"),
        drawn_by_a_step(loss={"entrypoint": "tests.userland.losses:weighted"}),
        drawn_by_a_step(data={"entrypoint": "tests.userland.data:noisy"}),
    ]
    assert untouched not in seeded
    assert seeded[0] == seeded[1]


def test_a_beginning_that_was_written_into_is_not_used_again() -> None:
    start, mean = Start(), torch.zeros(())
    first = start.of(mean, 2.0)
    assert start.of(mean, 2.0) is first
    first.mul_(3)
    assert start.of(mean, 2.0).item() == 2.0
    assert start.of(mean, 5.0).item() == 5.0
    assert start.of(mean.double(), 5.0).dtype == torch.float64
