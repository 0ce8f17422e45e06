"""A state that training has made infinite is named; what was infinite before is not."""

import pytest
import torch
from torch import nn

from stratagem.worker.session.finite import diverged, parameters_of

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2)
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_finite_and_is_not_is_named(dtype: torch.dtype) -> None:
    base = {"model/w": torch.zeros(3), "model/mask": torch.tensor([0.0, -INF, NAN])}
    base = {name: tensor.to(dtype) for name, tensor in base.items()}
    asked: list[int] = []

    def before() -> dict[str, torch.Tensor]:
        asked.append(1)
        return base

    known: dict[str, torch.Tensor] = {}
    whole = {**base, "model/count": torch.tensor(3), "model/none": torch.zeros(0, dtype=dtype)}
    assert diverged({**whole, "model/mask": base["model/mask"].clone()}, known, before) == ""
    assert diverged(whole, known, before) == ""
    assert len(asked) == 1  # what is known needs no second look
    for wrong in (INF, -INF, NAN):
        after = {**whole, "model/w": torch.tensor([1.0, wrong, 1.0]).to(dtype)}
        assert diverged(after, known, before) == "model/w"
    after = {**whole, "model/mask": torch.tensor([INF, -INF, NAN]).to(dtype)}
    assert diverged(after, known, before) == "model/mask"


def test_models_apart_and_averages_begin_with_the_one_model() -> None:
    base = {"model/mask": torch.tensor([-INF])}
    names = ("node0/model/mask", "average/mask", "replica1/average/mask")
    after = {name: torch.tensor([-INF]) for name in names}
    assert diverged(after, {}, lambda: base) == ""
    assert diverged({"node0/model/w": torch.tensor([-INF])}, {}, lambda: base) == "node0/model/w"
    optimizer = {"optimizer/w/amax": torch.tensor([INF]), "outer/w/buffer": torch.tensor([INF])}
    assert parameters_of({**after, **optimizer}, nn.Module()).keys() == {*names}


def test_buffers_may_become_anything_and_parameters_under_no_name() -> None:
    """A running maximum begins late, and a mask is filled again."""
    model = nn.BatchNorm1d(1)
    model.tied = model.weight
    names = [f"{of}model/{key}" for of in ("", "node0/") for key in model.state_dict()]
    state = {name: torch.tensor([INF]) for name in (*names, "average/weight")}
    kept = parameters_of(state, model).keys()
    assert kept == {
        *(f"{of}model/{key}" for of in ("", "node0/") for key in ("weight", "bias", "tied")),
        "average/weight",
    }
