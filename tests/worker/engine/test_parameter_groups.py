"""Groups of parameters with values of their own, against torch's groups, and frozen parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import JobSpec, OptimizerSpec, with_fields
from stratagem.worker.engine.apply_step import set_learning_rates
from stratagem.worker.engine.optimizers import make_optimizer, update
from stratagem.worker.models.build import build_model, build_shapes
from stratagem.worker.plans.build import go_on
from tests.jobs import document, job
from tests.worker.engine.support import ALLOWED

CPU = torch.device("cpu")
PARAMS = [("bias", 1), ("weight", 2)]
GROUPS = [
    {"name": "head", "match": ["2.*"], "lr": 0.5},
    {"name": "no_decay", "max_dims": 1, "weight_decay": 0.0, "betas": [0.5, 0.9]},
]


def spec_of(groups: list[dict[str, Any]], **changes: Any) -> OptimizerSpec:
    document = {"name": "adamw", "lr": 0.1, "weight_decay": 0.3, "groups": groups, **changes}
    return OptimizerSpec.model_validate(document)


def tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    for step in range(4):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.rand(5, 3)).square().mean().backward()
        set_learning_rates(optimizer, 1.0 - 0.2 * step)
        update(optimizer)
    return [param.detach() for param in model.parameters()]


def test_each_parameter_is_trained_as_in_the_first_group_that_holds_it() -> None:
    ours, theirs = tower(), tower()
    named = dict(theirs.named_parameters())
    head = [named["2.weight"], named["2.bias"]]
    vectors = [named["0.bias"], named["1.weight"], named["1.bias"]]
    groups = [
        {"params": [named["0.weight"]], "initial_lr": 0.1},
        {"params": head, "initial_lr": 0.5},
        {"params": vectors, "initial_lr": 0.1, "weight_decay": 0.0, "betas": (0.5, 0.9)},
    ]
    plain = torch.optim.AdamW(groups, weight_decay=0.3, foreach=False, fused=True)
    found = trained(ours, make_optimizer(spec_of(GROUPS), ours.named_parameters()))
    assert all(map(torch.equal, found, trained(theirs, plain)))


def test_both_conditions_of_a_group_must_hold() -> None:
    spec = spec_of([{"name": "few", "match": ["*.bias", "norm.*"], "max_dims": 1, "lr": 1.0}])
    assert spec.group_of("layer.bias", 1) == spec.group_of("norm.weight", 0) == "few"
    assert spec.group_of("norm.weight", 2) == spec.group_of("layer.weight", 1) == "default"


def test_a_member_without_parameters_of_a_group_leaves_it_out() -> None:
    model = tower()
    params = [(name, param) for name, param in model.named_parameters() if name[0] == "0"]
    optimizer = make_optimizer(spec_of(GROUPS), params)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


@pytest.mark.parametrize("build", [build_model, build_shapes])
def test_frozen_parameters_are_not_trained(build: Any) -> None:
    model = {**document("mlp")["model"], "freeze": ["0.*"]}
    fresh = {"fresh": True} if build is build_model else {}
    frozen = build(job(model), ALLOWED, device=CPU, **fresh)
    assert {name for name, p in frozen.named_parameters() if not p.requires_grad} == {
        "0.weight",
        "0.bias",
    }


def test_a_pattern_and_a_group_that_hold_nothing_are_refused() -> None:
    spec = job("mlp")
    with pytest.raises(InvalidInputError, match=r"model.freeze\[1\]: 'o.\*' fits no parameter"):
        build_model(
            with_fields(spec, {"model.freeze": ["0.*", "o.*"]}), ALLOWED, device=CPU, fresh=True
        )
    groups: Any = [{"name": "convolutions", "match": ["conv*"], "lr": 0.1}]
    with pytest.raises(
        InvalidInputError,
        match=r"optimizer.groups\[0\]: 'convolutions' holds no trained parameter: "
        r"match 'conv\*' fits none; they are 0.weight, 0.bias, 2.weight",
    ):
        build_model(
            with_fields(spec, {"optimizer.groups": groups}), ALLOWED, device=CPU, fresh=True
        )


def test_a_group_behind_one_that_holds_all_of_its_own_names_it() -> None:
    groups: Any = [{"name": "all", "match": ["*"]}, {"name": "small", "max_dims": 1}]
    changed = with_fields(job("mlp"), {"optimizer.groups": groups})
    expected = r"'small' .* max_dims 1 fits 0.bias, .*, which group 'all' before it holds"
    with pytest.raises(InvalidInputError, match=expected):
        build_model(changed, ALLOWED, device=CPU, fresh=True)


def test_a_group_is_found_by_its_name() -> None:
    spec: JobSpec = with_fields(job("mlp"), {"optimizer.groups": GROUPS[:1]})  # type: ignore[dict-item]
    changed = with_fields(spec, {"optimizer.groups.head.lr": 0.25})
    assert changed.optimizer.groups
    assert changed.optimizer.groups[0].lr == 0.25
    with pytest.raises(InvalidInputError, match=r"optimizer.groups has no item 'tail'"):
        with_fields(spec, {"optimizer.groups.tail.lr": 0.25})
    with pytest.raises(InvalidInputError, match="is a list; name the item"):
        with_fields(spec, {"optimizer.groups.head": 0.25})


def test_a_group_that_keeps_other_state_makes_it_structural() -> None:
    one = spec_of([{"name": "vectors", "max_dims": 1, "lr": 0.5}])
    other = spec_of([{"name": "vectors", "max_dims": 1, "amsgrad": True}])
    assert go_on(one, spec_of([{"name": "vectors", "max_dims": 1, "lr": 0.1}]), PARAMS)
    assert not go_on(one, other, PARAMS)
    assert not go_on(one, spec_of([]), PARAMS)
