"""Pieces of parameters, each with moments of its own, get the bits of whole parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job import OptimizerSpec
from stratagem.common.job.checks import BY_ELEMENT
from stratagem.worker.engine.apply_step import set_learning_rates
from stratagem.worker.engine.optimizers import make_optimizer, update
from stratagem.worker.engine.slices import OptimizerPieces
from stratagem.worker.engine.state_format import load_optimizer_state, optimizer_state
from stratagem.worker.exchange.layout import BLOCK, plan_layout
from stratagem.worker.exchange.slice_owners import SliceOwners, divide_slices
from tests.every_pair import every_value

NUM_STEPS = 40
"""Scalar code for the last elements was seen to agree for 8 steps and to differ after 16."""
SHAPES = ((1, BLOCK + 13), (131,), (), (7, 3), (0, 4))
FURTHER: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "weight_decay": 0.01},
    "adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.01},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "adamw": {"amsgrad": True},
}
Named = list[tuple[str, nn.Parameter]]


def params_of(dtype: torch.dtype = torch.float32) -> Named:
    generator = torch.Generator().manual_seed(7)
    return [
        (f"p{i}", nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for i, shape in enumerate(SHAPES)
    ]


def owners_of(params: Named, size: int) -> SliceOwners:
    layout = plan_layout([(n, p.dtype, p.shape) for n, p in params], num_extras=1)
    return divide_slices(layout, size)


def pieces_of(spec: OptimizerSpec, params: Named, size: int, rank: int) -> OptimizerPieces:
    return OptimizerPieces(make_optimizer(spec, params), params, owners_of(params, size), rank)


class Members:
    """The whole parameters, and the same ones divided among members."""

    def __init__(self, spec: OptimizerSpec, size: int, dtype: torch.dtype) -> None:
        self.whole, self.divided = params_of(dtype), params_of(dtype)
        self.optimizer = make_optimizer(spec, self.whole)
        self.members = [pieces_of(spec, self.divided, size, rank) for rank in range(size)]
        self.dtype = dtype

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        grads: list[Tensor | None] = [
            torch.randn(p.shape, generator=generator).to(self.dtype) for _, p in self.whole
        ]
        if number % 3 == 2:
            grads[1] = None  # a parameter that no shard has reached
        set_learning_rates(self.optimizer, 1 / (1 + number % 5))
        for (_, param), grad in zip(self.whole, grads, strict=True):
            param.grad = grad
        update(self.optimizer)
        for each in self.members:
            set_learning_rates(each.optimizer, 1 / (1 + number % 5))
            for piece, part in zip(each.tensors, each.owners.parts[each.rank], strict=True):
                grad = grads[part.index]
                piece.grad = None if grad is None else grad.view(-1)[part.first : part.stop]
            update(each.optimizer)

    def assert_same(self) -> None:
        for (name, one), (_, other) in zip(self.whole, self.divided, strict=True):
            assert torch.equal(one, other), name
        expected, numbers = optimizer_state(self.optimizer, self.whole)
        found: dict[str, list[Tensor]] = {}
        told: dict[str, str] = {}
        for each in self.members:
            tensors, texts = each.own_state()
            told |= texts
            for name, tensor in tensors.items():
                found.setdefault(name.split("/", 4)[4], []).append(tensor.reshape(-1))
        assert told == numbers
        assert found.keys() == expected.keys()
        for name, parts in found.items():
            assert torch.equal(torch.cat(parts), expected[name].reshape(-1)), name


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in BY_ELEMENT),
        *every_value([*BY_ELEMENT], [torch.float64, torch.bfloat16]),
    ],
)
def test_pieces_have_the_bits_of_whole_parameters(name: str, dtype: torch.dtype) -> None:
    spec = OptimizerSpec.model_validate({"name": name, "lr": 0.01, **FURTHER.get(name, {})})
    members = Members(spec, 2, dtype)
    for number in range(NUM_STEPS):
        members.step(number)
    members.assert_same()


def test_a_state_goes_to_another_number_of_members_and_back() -> None:
    spec = OptimizerSpec.model_validate({"name": "nadam", "lr": 0.01})
    before = Members(spec, 3, torch.float32)
    for number in range(4):
        before.step(number)
    state, numbers = optimizer_state(before.optimizer, before.whole)
    after = Members(spec, 2, torch.float32)
    with torch.no_grad():
        for (_, new), (_, other), (_, old) in zip(
            after.whole, after.divided, before.whole, strict=True
        ):
            new.copy_(old)
            other.copy_(old)
    load_optimizer_state(after.optimizer, after.whole, state, numbers)
    for each in after.members:
        each.load(state, numbers)
    after.assert_same()
    alone = pieces_of(spec, after.divided, 1, 0)
    alone.load(state, numbers)
    tensors, texts = alone.whole_state()
    assert list(tensors) == list(state)
    assert texts == numbers
    assert all(torch.equal(tensors[name], state[name]) for name in state)
    for number in range(4, 8):
        after.step(number)
    after.assert_same()


def test_a_state_of_an_unknown_parameter_is_refused() -> None:
    spec = OptimizerSpec.model_validate({"name": "adam", "lr": 0.01})
    pieces = pieces_of(spec, params_of(), 3, 1)
    with pytest.raises(InvalidInputError, match="belongs to no trainable parameter"):
        pieces.load({"optimizer/other/exp_avg": torch.zeros(3)}, {})
    with pytest.raises(InvalidInputError, match="belongs to no trainable parameter"):
        pieces.load({}, {"optimizer/other/step": "3"})


def test_parameters_that_are_not_contiguous_are_refused() -> None:
    params = [("p", nn.Parameter(torch.zeros(3, 4).t()))]
    spec = OptimizerSpec.model_validate({"name": "adam", "lr": 0.01})
    with pytest.raises(InvalidInputError, match="needs contiguous parameters; p is not"):
        pieces_of(spec, params, 2, 0)
