"""Triton program, torch reference and the codecs' numpy give the same bits, at uneven sizes.

Without a GPU the programs run under triton's interpreter, see conftest.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stratagem.common.numerics.shards import pairwise_sum
from stratagem.worker import kernels
from stratagem.worker.kernels import torch as torch_kernels
from stratagem.worker.kernels.ops import Backend, backend
from tests.every_pair import every_value
from tests.worker.kernels import oracle

BLOCK = 1024  # of the programs
SIZES = (0, 1, 3, 4, 5, 7, 513, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)
SEEDS = (0, 0x80000000, 0xFFFFFFFF)


def vector(n: int, seed: int = 0) -> Tensor:
    """Normal numbers, with the odd ones among them."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    odd = torch.tensor([0.0, -0.0, 0.5, -0.5, 1e-42, -3e38])
    x[1 : 1 + odd.numel()] = odd[: max(0, n - 1)]
    return x


def assert_same(left: Tensor, right: Tensor) -> None:
    """Equal dtype, shape and bits; any NaN is like any other."""
    left, right = left.cpu(), right.cpu()
    assert (left.dtype, left.shape) == (right.dtype, right.shape)
    if left.is_floating_point():
        assert torch.equal(left.isnan(), right.isnan())
        left, right = left.nan_to_num(7.0), right.nan_to_num(7.0)
        assert torch.equal(left.signbit(), right.signbit())
    assert torch.equal(left, right)


@pytest.mark.parametrize("seed", SEEDS)
def test_signs(fused: Backend, device: torch.device, seed: int) -> None:
    for n in (0, 1, 7, BLOCK + 3):
        plain = torch_kernels.signs(seed, n, torch.device("cpu"))
        assert_same(plain, torch.from_numpy(oracle.signs(seed, n)))
        assert_same(fused.signs(seed, n, device), plain)


@pytest.mark.parametrize("n", SIZES)
def test_quantise(fused: Backend, device: torch.device, n: int) -> None:
    x, scale = vector(n), float(np.float32(0.7))
    signs = oracle.deterministic(x.numpy(), 0.5)
    codes, rest = torch_kernels.quantise_deterministic(x, 0.5, scale, None), torch.empty_like(x)
    assert codes.numpy().tobytes() == oracle.pack(signs).tobytes()
    assert_same(torch_kernels.quantise_deterministic(x, 0.5, scale, rest), codes)
    assert_same(rest, torch.from_numpy(x.numpy() - signs * np.float32(0.7)))
    there = x.to(device, copy=True)
    assert_same(fused.quantise_deterministic(there, 0.5, scale, None), codes)
    assert_same(there, x)
    assert_same(fused.quantise_deterministic(there, 0.5, scale, there), codes)
    assert_same(there, rest)
    drawn = torch_kernels.quantise_stochastic(x, scale, 9)
    assert drawn.numpy().tobytes() == oracle.pack(oracle.stochastic(x.numpy(), 0.7, 9)).tobytes()
    assert_same(fused.quantise_stochastic(x.to(device), scale, 9), drawn)


@pytest.mark.parametrize(("n", "scale"), every_value(SIZES, [0.3, -2.0, 0.0]))
def test_unpack(fused: Backend, device: torch.device, n: int, scale: float) -> None:
    scale = float(np.float32(scale))
    signs = oracle.deterministic(vector(n, 2).numpy(), 0.5)
    codes = torch.from_numpy(oracle.pack(signs))
    expected = torch.from_numpy(signs * np.float32(scale))
    plain = torch_kernels.unpack(codes, n, scale)
    assert_same(plain, expected)
    assert_same(fused.unpack(codes.to(device), n, scale), plain)
    target, there = vector(n, 3), vector(n, 3).to(device)
    torch_kernels.unpack_add(target, codes, scale)
    fused.unpack_add(there, codes.to(device), scale)
    assert_same(target, vector(n, 3) + expected)
    assert_same(there, target)


@pytest.mark.parametrize("n", [*SIZES, 33 * BLOCK + 1])
def test_sums(fused: Backend, device: torch.device, n: int) -> None:
    x, y = vector(n, 4), vector(n, 5)
    products = (x.double() * y.double()).numpy()
    plain = torch_kernels.dot(x, y)
    assert plain.item() == oracle.tree_sum(products.tolist()) == pairwise_sum(products)
    assert_same(fused.dot(x.to(device), y.to(device)), plain)
    for threshold in (-1.0, 0.5):
        magnitude = np.abs(x.numpy()).astype(np.float64)
        kept = np.where(magnitude > threshold, magnitude, 0.0)
        counted = torch_kernels.sum_magnitudes(x, threshold)
        assert counted.tolist() == [pairwise_sum(kept), (magnitude > threshold).sum()]
        assert_same(fused.sum_magnitudes(x.to(device), threshold), counted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_sum_tells_what_is_not_finite(fused: Backend, device: torch.device, bad: float) -> None:
    x = torch.full((7,), 3e38)
    x[5] = bad
    for total in (torch_kernels.sum_magnitudes(x, -1.0), fused.sum_magnitudes(x.to(device), -1.0)):
        assert torch.isfinite(total[0]).item() is (bad == 3e38)
        assert total[1].item() == 7


def test_a_sum_is_never_a_negative_zero(fused: Backend, device: torch.device) -> None:
    for n in (0, 1, 2, 3):
        x, y = torch.full((n,), -0.0), torch.ones(n)
        for total in (torch_kernels.dot(x, y), fused.dot(x.to(device), y.to(device))):
            assert math.copysign(1.0, total.item()) == 1.0
        assert math.copysign(1.0, pairwise_sum(x.numpy())) == 1.0


@pytest.mark.parametrize(
    ("size", "n"),
    [
        *((1, 0), (1, 1), (1, 9), (2, 7), (8, 7), (8, 8), (8, 9)),
        *((512, 9), (512, BLOCK + 1), (2 * BLOCK, 1), (2 * BLOCK, BLOCK + 1)),
    ],
)
def test_sketch(fused: Backend, device: torch.device, size: int, n: int) -> None:
    """The interpreter and the oracle are slow, so few are long."""
    seed, scale = 0x80000001, float(np.float32(0.3))
    x = vector(n, 6)
    plain = torch_kernels.sketch(x, size, seed)
    assert_same(plain, torch.from_numpy(oracle.sketch(x.numpy(), size, seed)))
    assert_same(fused.sketch(x.to(device), size, seed), plain)
    back = torch_kernels.unsketch(plain, n, seed, scale)
    assert_same(back, torch.from_numpy(oracle.unsketch(plain.numpy(), n, seed, scale)))
    assert_same(fused.unsketch(plain.to(device), n, seed, scale), back)


@settings(max_examples=15)
@given(st.integers(0, 200), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_unsketch_is_the_transpose(n: int, log_size: int, seed: int) -> None:
    x = vector(n).clamp(-9, 9)
    y = vector(1 << log_size, 1).clamp(-9, 9)
    left = kernels.sketch(x, 1 << log_size, seed).double() @ y.double()
    right = x.double() @ kernels.unsketch(y, n, seed).double()
    assert left.item() == pytest.approx(right.item(), rel=1e-4, abs=1e-4)
    if n <= 1 << log_size:  # one block: a signed permutation
        assert torch.equal(kernels.unsketch(kernels.sketch(x, 1 << log_size, seed), n, seed), x)


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40),
    st.floats(0, 2**100, width=32),
    st.integers(0, 2**32 - 1),
)
def test_quantised_and_back(values: list[float], scale: float, seed: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    signs = oracle.deterministic(x.numpy(), scale)
    codes = kernels.quantise_deterministic(x, scale)
    assert kernels.unpack(codes, x.numel()).tolist() == signs.tolist()
    rest = x.clone()
    assert torch.equal(kernels.quantise_deterministic(rest, scale, scale=scale, rest=rest), codes)
    assert torch.equal(rest, x - kernels.unpack(codes, x.numel(), scale))
    codes = kernels.quantise_stochastic(x, scale, seed)
    assert kernels.unpack(codes, x.numel()).tolist() == (
        oracle.stochastic(x.numpy(), scale, seed).tolist()
    )


def test_stochastic_is_unbiased() -> None:
    x = torch.tensor([0.5, -0.25, 0.0, 1.0]).repeat(50_000)
    sent = kernels.unpack(kernels.quantise_stochastic(x, 1.0, 11), x.numel())
    assert torch.allclose(sent.view(-1, 4).mean(0), x[:4], atol=0.01)


def test_dispatch() -> None:
    assert backend(torch.device("cpu")) is torch_kernels
    if torch.cuda.is_available():
        assert backend(torch.device("cuda:0")) is not torch_kernels


def test_the_interpreter_takes_tensors_of_the_cpu(
    fused: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend(torch.device("cpu")) is fused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kernels.sketch(x, 12, 0), "size: 12; must be a power of two"),
        (lambda x: kernels.sketch(x, 8, 2**32), "seed: 4294967296; must be from 0 to"),
        (lambda x: kernels.sketch(x[::2], 8, 0), "x: .*strides.*contiguous vector of float32"),
        (lambda x: kernels.quantise_deterministic(x.double(), 1.0), "x: torch.float64"),
        (lambda x: kernels.quantise_deterministic(x, -1.0), "threshold: -1.0; must be at least 0"),
        (lambda x: kernels.quantise_stochastic(x, 1e39, 0), "scale: 1e[+]39; must be a finite"),
        (
            lambda x: kernels.quantise_deterministic(x, 1.0, rest=x[1:]),
            "rest: 7 elements; must be 8",
        ),
        (lambda x: kernels.unpack(x.byte(), 8), "codes: 8 bytes; must be 2 for 8 elements"),
        (lambda x: kernels.unpack(x.byte(), -1), "numel: -1"),
        (lambda x: kernels.dot(x, x[1:]), "y: 7 elements; must be 8"),
        (lambda x: kernels.signs(0, -1, x.device), "numel: -1; must be at least 0"),
    ],
)
def test_bad_arguments_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(8))  # type: ignore[operator]
