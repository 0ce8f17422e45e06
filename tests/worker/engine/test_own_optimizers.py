"""Optimizers by entry point: what they are given, and which cannot go on from a saved state."""

from typing import Any

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, UserCodeError
from stratagem.common.job import OptimizerSpec, entry_points
from stratagem.worker.engine import build_trainer
from stratagem.worker.engine.optimizers import make_optimizer, update
from stratagem.worker.engine.round_trip import check_alone
from stratagem.worker.federated.client_trainer import ClientRunner
from stratagem.worker.models.build import build_model
from stratagem.worker.plans.build import go_on
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.cluster.jobs import federated, population
from tests.jobs import job
from tests.worker.engine.support import ALLOWED, CPU, assert_same_bits, trainer_of

OWN = "tests.userland.optimizers"


def own(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"entrypoint": f"{OWN}:{name}", "lr": 0.01, **kwargs}


MATRICES = {"name": "muon", "lr": 0.02, "momentum": 0.9, "weight_decay": 0.0}
SEVERAL: dict[str, Any] = {
    "name": "adamw",
    "lr": 0.003,
    "weight_decay": 0.1,
    "schedule": "onecycle",
    "clip_norm": 1.0,
    "groups": [
        {"name": "biases", "match": ["*.bias"], "weight_decay": 0.0},
        {"name": "head", "match": ["3.*"], "optimizer": own("lion", betas=[0.8, 0.9])},
        {"name": "matrices", "match": ["*.weight"], "optimizer": MATRICES},
    ],
}


def test_they_make_the_steps_of_optimizers_made_by_hand() -> None:
    lion = pytest.importorskip("lion_pytorch")
    spec = OptimizerSpec.model_validate({**SEVERAL, "schedule": None})
    ours, theirs = (build_model(job("dropout_mlp"), ALLOWED, device=CPU, fresh=True) for _ in "12")
    one = make_optimizer(spec, ours.named_parameters(), entrypoints=ALLOWED)
    named = dict(theirs.named_parameters())
    by_hand = [
        torch.optim.AdamW(
            [named["0.bias"], named["3.bias"]], lr=0.003, weight_decay=0.0, fused=True
        ),
        lion.Lion([named["3.weight"]], lr=0.01, betas=(0.8, 0.9)),
        torch.optim.Muon([named["0.weight"]], lr=0.02, momentum=0.9, weight_decay=0.0),
    ]
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            torch.manual_seed(step)
            model(torch.rand(4, 12)).square().sum().backward()
        update(one)
        for optimizer in by_hand:
            optimizer.step()
    assert_same_bits(ours.state_dict(), theirs.state_dict())
    group = {"name": "all", "match": ["*"], "optimizer": MATRICES}
    with pytest.raises(InvalidInputError, match=r"optimizer.groups\[0\].optimizer: muon: .*2D"):
        trainer_of(job(optimizer={**SEVERAL, "groups": [group]}))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("CountsItself", r"its attribute 'num_steps' was 2 and is 0"),
        ("CountsInGroups", r"param_groups\[0\]\['k'\] was 2 and is None"),
        ("Remembers", r"keeps a list \('past' of '0.weight'\); it may keep tensors and numbers"),
        ("Noisy", r"next steps update '0.weight' otherwise.* or draws random numbers"),
        ("Hidden", r"next steps update '0.weight' otherwise; it keeps something outside"),
        ("nothing", r"optimizers:nothing\" returned a float, not a torch.optim.Optimizer"),
        ("forgetful", r"leaves out '0.weight'; freeze what is not trained"),
    ],
)
def test_what_cannot_go_on_from_its_state_is_refused(name: str, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        trainer_of(job(optimizer=own(name)), fresh=False)
    with pytest.raises(InvalidInputError, match=told):
        ClientRunner(federated(optimizer=own(name)), ALLOWED, CPU)


def test_an_unknown_keyword_is_the_users_error_and_what_is_not_allowed_is_not_imported() -> None:
    with pytest.raises(UserCodeError, match="unexpected keyword argument 'betaz'"):
        trainer_of(job(optimizer=own("lion", betaz=1)))
    few = EntryPoints(["tests.userland.models:*", "tests.userland.data:*"])
    with pytest.raises(InvalidInputError, match=r"optimizer\.entrypoint.*is not allowed"):
        build_trainer(job(optimizer=own("lion")), few, device=CPU, fresh=True)


def test_what_looks_at_all_gradients_is_no_optimizer_of_a_stage() -> None:
    spec = job(optimizer=own("Together"))
    model = build_model(spec, ALLOWED, device=CPU, fresh=True)
    params = list(model.named_parameters())
    with pytest.raises(InvalidInputError, match=r"updates '0.weight' by the gradients of other"):
        check_alone(spec.optimizer, params, ALLOWED)
    for name in ("SignMomentum", "lion", "halves"):
        check_alone(OptimizerSpec.model_validate(own(name)), params, ALLOWED)


def test_what_a_population_may_draw_is_allowed_too() -> None:
    space = {"optimizer.entrypoint": {"choices": [f"{OWN}:lion", f"{OWN}:halves"]}}
    spec = population(optimizer=own("lion"), search_space=space)
    assert entry_points(spec)[-2:] == (f"{OWN}:lion", f"{OWN}:halves")


def test_members_may_vary_what_the_state_does_not_depend_on() -> None:
    params = [("bias", 1), ("weight", 2)]
    one = OptimizerSpec.model_validate(own("halves"))
    faster = OptimizerSpec.model_validate(own("halves", weight_decay=0.5))
    other = OptimizerSpec.model_validate(own("halves", amsgrad=True))
    assert go_on(one, faster, params, ALLOWED)
    assert not go_on(one, other, params, ALLOWED)


def test_the_optimizer_of_a_group_may_make_its_state_another() -> None:
    params = [("0.weight", 2), ("0.bias", 1), ("3.weight", 2)]

    def spec(**head: Any) -> OptimizerSpec:
        group = {"name": "head", "match": ["3.*"], "optimizer": {**MATRICES, **head}}
        return OptimizerSpec.model_validate(own("halves", groups=[group]))

    assert go_on(spec(), spec(lr=0.5, nesterov=False), params, ALLOWED)
    other = {"name": "head", "match": ["3.*"], "optimizer": {"name": "adamw", "lr": 0.1}}
    changed = OptimizerSpec.model_validate(own("halves", groups=[other]))
    assert not go_on(spec(), changed, params, ALLOWED)
