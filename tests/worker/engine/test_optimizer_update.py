"""An update without torch's wrappers against `optimizer.step()`."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from stratagem.common.job import OptimizerSpec
from stratagem.common.job.optimizer import KEYWORDS, why_no_value
from stratagem.worker.engine.optimizers import _OPTIMIZERS, make_optimizer, update

SHAPES = {"muon": ((7, 3), (1, 1)), "adafactor": ((7, 3), (1,), ())}
"""Muon takes matrices only, and Adafactor none that is empty."""


def test_the_table_of_keywords_is_torchs() -> None:
    """lr is the job's own; whether to use other kernels is ours to say."""
    ours = {"self", "params", "lr", "foreach", "fused", "capturable"}
    unusual = {"Optimizer", "LBFGS", "SparseAdam"}
    found = {
        name.lower(): set(inspect.signature(kind).parameters) - ours
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if name not in unusual
    }
    assert {name: set(known) for name, known in KEYWORDS.items()} == found
    assert all(len(set(known)) == len(known) for known in KEYWORDS.values())
    usual = {
        (name.lower(), key): each.default
        for name, kind in vars(torch.optim).items()
        if name.lower() in KEYWORDS
        for key, each in inspect.signature(kind).parameters.items()
        if key in KEYWORDS[name.lower()]
    }
    assert len(usual) > 60
    refused = {at: why for at, value in usual.items() if (why := why_no_value(*at, value))}
    assert refused == {}


def params_of(seed: int, shapes: tuple[tuple[int, ...], ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def named(params: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(str(i), param) for i, param in enumerate(params)]


@pytest.mark.parametrize("name", sorted(_OPTIMIZERS))
def test_has_the_bits_of_a_step(name: str) -> None:
    shapes = SHAPES.get(name, ((7, 3), (1,), (0,), ()))
    left, right = params_of(0, shapes), params_of(0, shapes)
    spec = OptimizerSpec(name=name, lr=0.01)
    one, other = make_optimizer(spec, named(left)), make_optimizer(spec, named(right))
    for step in range(3):
        grads = params_of(step + 1, shapes)
        for params in (left, right):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.detach().clone()
        if step == 1:
            left[1].grad = right[1].grad = None
        update(one)
        other.step()
        assert all(map(torch.equal, left, right))
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(param.requires_grad for param in left)
    assert torch.is_grad_enabled()


@contextmanager
def counting(calls: list[str]) -> Iterator[None]:
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("hook"))
    try:
        yield
    finally:
        handle.remove()


def test_a_hook_for_all_optimizers_is_called() -> None:
    (param,) = params_of(0, ((3,),))
    optimizer, calls = (
        make_optimizer(OptimizerSpec(name="sgd", lr=0.1), named([param])),
        list[str](),
    )
    param.grad = torch.ones(3)
    with counting(calls):
        update(optimizer)
    update(optimizer)
    assert calls == ["hook"]


def test_a_recording_names_the_step() -> None:
    (param,) = params_of(0, ((3,),))
    optimizer = make_optimizer(OptimizerSpec(name="sgd", lr=0.1), named([param]))
    param.grad = torch.ones(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        update(optimizer)
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kwargs", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_bits_of_sgd_do_not_depend_on_the_place_in_memory(
    dtype: torch.dtype, kwargs: dict[str, float]
) -> None:
    """Torch's own kernel for momentum in 16 bits rounds otherwise at another place."""
    found = []
    for shift in (0, 1, 3, 8, 0, 16):
        store = torch.empty(4099 + 16, dtype=dtype)
        param = nn.Parameter(store[shift : shift + 4099])
        with torch.no_grad():
            param.copy_(torch.randn(4099, generator=torch.Generator().manual_seed(1)))
        spec = OptimizerSpec.model_validate({"name": "sgd", "lr": 0.01, **kwargs})
        optimizer = make_optimizer(spec, [("p", param)])
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            param.grad = torch.randn(4099, generator=generator).to(dtype)
            update(optimizer)
        found.append([param.detach(), *optimizer.state[param].values()])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True) if a is not None)
