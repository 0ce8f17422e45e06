"""The norm of all gradients: added up in blocks and a tree, whoever holds which parameters."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stratagem.common.numerics.rules import CURRENT, FIRST
from stratagem.worker.exchange import SingleMemberReducer, reducer
from stratagem.worker.exchange.layout import BLOCK, FewGradients, divided, parts_of, total_norm
from tests.jobs import job, user_model
from tests.reference.loops import sharded_loop
from tests.reference.reference_norm import gradient_norm
from tests.worker.engine.support import ALLOWED, assert_same_bits, in_buckets, trainer_of

SIZES = st.sampled_from([0, 1, 7, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 7])
BOTH = pytest.mark.parametrize("numerics", [FIRST, CURRENT])
WIDE = user_model("mlp", hidden=6000)


def random(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sizes) + sum(sizes))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def params_with(grads: list[Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return params


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(SIZES, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_it_is_the_norm_of_the_rule(sizes: list[int], dtype: torch.dtype) -> None:
    grads = random(sizes, dtype)
    norm = total_norm(parts_of(grads, CURRENT), CURRENT)
    assert torch.equal(norm, gradient_norm(params_with(grads), CURRENT))
    exact = math.sqrt(math.fsum(each * each for grad in grads for each in grad.double().tolist()))
    assert math.isclose(norm.item(), exact, rel_tol=1e-13)
    small = [grad for grad in grads if grad.numel() <= BLOCK]
    few = FewGradients([grad.shape for grad in small])
    assert all(map(torch.equal, few.parts(small, CURRENT), parts_of(small, CURRENT)))


@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(SIZES, min_size=1, max_size=6), cut=st.integers(0, 6))
def test_whoever_holds_the_parameters(sizes: list[int], cut: int) -> None:
    grads = random(sizes)
    parts = [*parts_of(grads[:cut], CURRENT), *parts_of(grads[cut:], CURRENT)]
    assert torch.equal(total_norm(parts, CURRENT), total_norm(parts_of(grads, CURRENT), CURRENT))


@BOTH
@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(SIZES, min_size=1, max_size=4))
def test_dividing_beside_it_changes_nothing(numerics: int, sizes: list[int]) -> None:
    grads = random(sizes)
    together = [grad.clone() for grad in grads]
    found = [divided(grad, 3.0, numerics) for grad in together]
    after = [grad / 3.0 for grad in grads]
    assert all(map(torch.equal, together, after))
    assert torch.equal(total_norm(found, numerics), total_norm(parts_of(after, numerics), numerics))


def test_where_a_gradient_lies_and_how_many_threads_compute_change_nothing() -> None:
    storage = torch.randn(3 * BLOCK + 11)
    threads = torch.get_num_threads()
    try:
        for offset in (0, 1, 3):
            view = storage[offset : offset + 2 * BLOCK + 5]
            found = []
            for num_threads in (1, 2):
                torch.set_num_threads(num_threads)
                found += [parts_of([view], CURRENT)[0], parts_of([view.clone()], CURRENT)[0]]
            assert all(torch.equal(each, found[0]) for each in found)
    finally:
        torch.set_num_threads(threads)


def test_a_gradient_that_lies_across_is_taken_in_its_own_order() -> None:
    across = torch.randn(300, 500).t()
    norms = parts_of([across], CURRENT)
    assert torch.equal(norms[0], parts_of([across.contiguous()], CURRENT)[0])
    there = across.clone(memory_format=torch.preserve_format)
    assert torch.equal(divided(there, 2.0, CURRENT), parts_of([across / 2.0], CURRENT)[0])
    assert torch.equal(there, across / 2.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows(value: float) -> None:
    (grad,) = random([BLOCK + 3])
    grad[BLOCK + 1] = value
    assert not math.isfinite(total_norm(parts_of([grad], CURRENT), CURRENT).item())


@pytest.mark.parametrize("numerics", [FIRST, 2, CURRENT])
def test_nothing_has_norm_0(numerics: int) -> None:
    """And its dtype is that of any norm."""
    norm = total_norm(parts_of([], numerics), numerics)
    assert norm.item() == 0.0
    assert norm.dtype == total_norm(parts_of([torch.ones(2)], numerics), numerics).dtype
    assert total_norm(FewGradients([]).parts([], numerics), numerics).item() == 0.0


@BOTH
@pytest.mark.parametrize("small_bytes", [-1, 1 << 30])
def test_a_clipped_step_has_the_bits_of_the_loop(
    numerics: int, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter of more than one block: alone, in buckets, and as two shards."""
    monkeypatch.setattr(reducer, "SMALL_BYTES", small_bytes)
    spec = job(model=WIDE, optimizer={"name": "sgd", "lr": 0.1, "clip_norm": 0.01}, steps=3)
    one, two = trainer_of(spec, numerics=numerics), trainer_of(spec, numerics=numerics)
    lonely, buckets = SingleMemberReducer(one.params, numerics), in_buckets(two, 1)
    for _ in range(3):
        assert one.train_step(lonely, range(1), 1) == two.train_step(buckets, range(1), 1)
    expected = sharded_loop(spec, ALLOWED, 1, numerics=numerics).state
    assert_same_bits(one.model.state_dict(), dict(expected))
    assert_same_bits(two.model.state_dict(), dict(expected))
    shards = trainer_of(spec, numerics=numerics)
    exchange = in_buckets(shards, 2)
    for _ in range(3):
        shards.train_step(exchange, range(2), 2)
    again = sharded_loop(spec, ALLOWED, 2, numerics=numerics).state
    assert_same_bits(shards.model.state_dict(), dict(again))
