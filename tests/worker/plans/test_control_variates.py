"""The control variates of a client: what its steps are corrected by, and what it measures."""

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.worker.engine.callbacks import Callbacks
from stratagem.worker.federated.client_trainer import ClientRound, ClientRunner, RoundSettings
from stratagem.worker.plans.client_state import (
    check_control,
    control_begun,
    control_moved,
    control_zeros,
    correction,
)
from tests.worker.engine.client_rounds import federated
from tests.worker.engine.support import ALLOWED, CPU, trainer_of
from tests.worker.site.jobs import offered


def round_of(after: dict[str, Tensor], reach: dict[str, float]) -> ClientRound:
    return ClientRound(after, 5, 0.1, 4, {}, frozenset(after), 4, reach)


def test_what_is_kept_is_the_mean_gradient_of_the_steps() -> None:
    """Steps of no length tell nothing."""
    base = {"model/w": torch.tensor([1.0, 2.0]), "control/w": torch.tensor([0.5, -0.5])}
    own, gradient = {"control/w": torch.tensor([0.25, 0.0])}, torch.tensor([3.0, -1.0])
    assert correction(base, own)["w"].tolist() == [0.25, -0.5]
    stepped = base["model/w"] - 4 * 0.125 * (gradient + correction(base, own)["w"])
    moved, changed = control_moved(base, own, round_of({"model/w": stepped}, {"w": 0.5}))
    assert moved["control/w"].tolist() == gradient.tolist()
    assert changed["control/w"].tolist() == [2.75, -1.0]
    moved, changed = control_moved(base, own, round_of({"model/w": base["model/w"]}, {"w": 0.0}))
    assert torch.equal(moved["control/w"], own["control/w"])
    assert not changed["control/w"].any()


def test_there_is_one_of_each_parameter_that_is_trained() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "bn": nn.BatchNorm1d(2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    model["bn"].requires_grad_(requires_grad=False)
    zeros = control_zeros(model)
    assert list(zeros) == ["control/a.weight", "control/a.bias", "control/b.bias"]
    assert control_begun({"model/a.weight": torch.ones(1), **zeros}).keys() == zeros.keys()


def test_each_step_is_corrected_and_their_rates_add_up() -> None:
    """By hand: one step over all rows is w - lr · (g + correction)."""
    sgd = {"name": "sgd", "lr": 0.1, "groups": [{"name": "b", "match": ["*.bias"], "lr": 0.5}]}
    spec = federated("mlp", num_clients=1, batch_size=1000, optimizer=sgd)
    base = {name: t for name, t in trainer_of(spec).copy_state()[0].items() if "model/" in name}
    added = {n.removeprefix("model/"): torch.full_like(t, 0.25) for n, t in base.items()}
    runner = ClientRunner(spec, ALLOWED, CPU)
    plain = runner.run(base, 0, 1, 1)
    done = runner.run(base, 0, 1, 1, settings=RoundSettings(correction=added))
    assert not plain.reach
    assert done.reach == {n: 0.5 if n.endswith("bias") else 0.1 for n in added}
    for name, reach in done.reach.items():
        expected = plain.tensors[f"model/{name}"] - reach * 0.25
        torch.testing.assert_close(done.tensors[f"model/{name}"], expected)


def test_a_parameter_that_no_loss_reaches_is_corrected_all_the_same() -> None:
    runner = ClientRunner(federated("mlp"), ALLOWED, CPU)
    names = [name for name, _ in runner._named]
    added = {name: torch.full_like(param, 2.0) for name, param in runner._named}
    correct = runner._pull(RoundSettings(correction=added))
    runner._params[0].grad = None
    runner._params[1].grad = torch.ones_like(runner._params[1])
    correct()
    correct()
    grads = dict(zip(names, (param.grad for param in runner._params), strict=True))
    first, second = (grads[name] for name in names[:2])
    assert first is not None
    assert second is not None
    assert (first.unique().tolist(), second.unique().tolist()) == ([4.0], [5.0])


@pytest.mark.parametrize(
    ("model", "hook", "expected"),
    [
        (nn.Linear(2, 2).bfloat16(), "on_step", "weight is torch.bfloat16, whose steps are too"),
        (nn.Linear(2, 2), "on_gradients", "on_gradients of callbacks changes them"),
        (nn.Linear(2, 2).double(), "on_step", ""),
    ],
)
def test_what_hides_the_gradient_is_refused(model: nn.Module, hook: str, expected: str) -> None:
    callbacks, scaffold = Callbacks(0, {hook: print}), offered(options={"control": "scaffold"})
    check_control(offered(), model, callbacks)
    if not expected:
        check_control(scaffold, model, callbacks)
        return
    with pytest.raises(InvalidInputError, match=expected) as error:
        check_control(scaffold, model, callbacks)
    assert "strategy.options.control" in str(error.value)
