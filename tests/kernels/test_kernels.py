"""Triton program, torch reference and the codecs' numpy give the same bits, at uneven sizes.

Without a GPU the programs run under triton's interpreter, see conftest.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stratagem.common.compression import ternary
from stratagem.worker import kernels
from stratagem.worker.kernels import reference
from stratagem.worker.kernels.ops import Backend, backend
from tests.kernels import oracle

BLOCK = 1024  # of the programs
SIZES = (0, 1, 3, 4, 5, 7, 513, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)
SEEDS = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
NARROW = (torch.float32, torch.bfloat16, torch.float16)


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


def on(device: torch.device, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if each is None else each.to(device, copy=True) for each in tensors]


@pytest.mark.parametrize("seed", SEEDS)
def test_hash_and_uniform(fused: Backend, device: torch.device, seed: int) -> None:
    edges = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 5]
    indices = torch.cat([torch.arange(BLOCK + 3), torch.tensor(edges)])
    for name in ("hash32", "uniform"):
        expected = getattr(oracle, name)(seed, indices.numpy())
        plain = getattr(reference, name)(seed, indices)
        assert np.array_equal(plain.numpy(), expected)
        assert_same(getattr(fused, name)(seed, indices.to(device)), plain)


def test_hash_is_the_published_one() -> None:
    # hash32 with seed 0 is lowbias32 twice; computed with Python's own integers.
    def lowbias32(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    indices = [0, 1, 2, 12345, 2**32 - 1]
    expected = [lowbias32(lowbias32(i) ^ 42) for i in indices]
    assert kernels.hash32(42, torch.tensor(indices)).tolist() == expected


def test_uniform_is_uniform() -> None:
    drawn = kernels.uniform(3, torch.arange(100_000))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.005
    assert abs(drawn.var() - 1 / 12) < 0.002


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("feeds_back", [False, True])
def test_quantise(fused: Backend, device: torch.device, n: int, feeds_back: bool) -> None:
    x, residual = vector(n), 0.1 * vector(n, 1) if feeds_back else None
    value = x.numpy() if residual is None else (x + residual).numpy()
    cases = [
        ("quantise_deterministic", (0.5,), (0.7,), oracle.deterministic(value, 0.5)),
        ("quantise_stochastic", (0.7, 9), (), oracle.stochastic(value, 0.7, 9)),
    ]
    for name, head, tail, signs in cases:
        results = []
        for which, place in ((reference, torch.device("cpu")), (fused, device)):
            there, left = on(place, (x, residual))
            results.append((getattr(which, name)(there, *head, left, *tail), left))
        (codes, left), (fused_codes, fused_left) = results
        assert codes.numpy().tobytes() == oracle.pack(signs).tobytes()
        assert_same(fused_codes, codes)
        if left is not None and fused_left is not None:
            assert_same(left, torch.from_numpy(value - signs * np.float32(0.7)))
            assert_same(fused_left, left)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("scale", [0.3, -2.0, 0.0])
def test_unpack(fused: Backend, device: torch.device, n: int, scale: float) -> None:
    scale = float(np.float32(scale))
    signs = oracle.deterministic(vector(n, 2).numpy(), 0.5)
    codes = torch.from_numpy(oracle.pack(signs))
    expected = torch.from_numpy(signs * np.float32(scale))
    plain = reference.unpack(codes, n, scale)
    assert_same(plain, expected)
    assert_same(fused.unpack(codes.to(device), n, scale), plain)
    target, there = vector(n, 3), vector(n, 3).to(device)
    reference.unpack_add(target, codes, scale)
    fused.unpack_add(there, codes.to(device), scale)
    assert_same(target, vector(n, 3) + expected)
    assert_same(there, target)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", NARROW)
def test_accumulate(fused: Backend, device: torch.device, n: int, dtype: torch.dtype) -> None:
    weight = float(np.float32(1 / 3))
    target, source = vector(n, 4), vector(n, 5).clamp(-1e3, 1e3).to(dtype)
    expected = target.numpy() + source.to(torch.float32).numpy() * np.float32(weight)
    there = target.to(device, copy=True)
    total = reference.accumulate(target, source, weight)
    assert_same(target, torch.from_numpy(expected))
    assert total.item() == oracle.tree_sum((expected.astype(np.float64) ** 2).tolist())
    assert_same(fused.accumulate(there, source.to(device), weight), total)
    assert_same(there, target)


def test_accumulate_folds_many_blocks(fused: Backend, device: torch.device) -> None:
    n = 3 * BLOCK + 1
    target = torch.arange(float(n)) + 0.1
    squares = target.double() ** 2
    total = fused.accumulate(target.to(device), torch.zeros(n, device=device), 1.0)
    assert_same(total, reference.tree_sum(squares))
    assert total.item() == pytest.approx(squares.sum().item(), rel=1e-14)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_accumulate_tells_what_is_not_finite(bad: float) -> None:
    target, source = torch.ones(7), torch.zeros(7)
    target[5] = bad
    total, is_finite = kernels.accumulate(target, source)
    assert is_finite.item() is (bad == 3e38)
    assert total.dtype == torch.float64
    # A sum of two finite numbers may overflow.
    target, source = torch.full((2,), 3e38), torch.full((2,), 3e38)
    assert kernels.accumulate(target, source)[1].item() is False


@pytest.mark.parametrize("size", [1, 2, 8, 512, 2 * BLOCK])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, BLOCK + 1])
def test_sketch(fused: Backend, device: torch.device, size: int, n: int) -> None:
    if n > 32 * size:
        n = 32 * size + 1  # the interpreter and the oracle are slow
    seed, scale = 0x80000001, float(np.float32(0.3))
    x = vector(n, 6)
    plain = reference.sketch(x, size, seed)
    assert_same(plain, torch.from_numpy(oracle.sketch(x.numpy(), size, seed)))
    assert_same(fused.sketch(x.to(device), size, seed), plain)
    back = reference.unsketch(plain, n, seed, scale)
    assert_same(back, torch.from_numpy(oracle.unsketch(plain.numpy(), n, seed, scale)))
    assert_same(fused.unsketch(plain.to(device), n, seed, scale), back)


@settings(max_examples=40)
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
    residual = torch.zeros_like(x)
    codes = kernels.quantise_stochastic(x, scale, seed, residual=residual)
    sent = kernels.unpack(codes, x.numel(), scale)
    assert torch.equal(residual, x - sent)
    assert kernels.unpack(codes, x.numel()).tolist() == (
        oracle.stochastic(x.numpy(), scale, seed).tolist()
    )


@pytest.mark.parametrize("n", [0, 1, 7, 1000])
def test_payloads_of_the_ternary_codec(n: int) -> None:
    x = vector(n, 8).clamp(-9, 9)
    for is_stochastic in (False, True):
        codec = ternary.Ternary(n, threshold_fraction=0.7, stochastic=is_stochastic)
        payload = codec.encode(x.numpy(), seed=5)
        scale = float(payload[:4].view("<f4")[0])
        if is_stochastic:
            codes = kernels.quantise_stochastic(x, scale, 5)
        else:
            threshold = np.float32(0.7) * ternary.mean(np.abs(x.numpy()))
            codes = kernels.quantise_deterministic(x, float(threshold))
        assert codes.numpy().tobytes() == payload[4:].tobytes()
        assert_same(kernels.unpack(codes, n, scale), torch.from_numpy(codec.decode(payload)))


def test_stochastic_is_unbiased() -> None:
    x = torch.tensor([0.5, -0.25, 0.0, 1.0]).repeat(50_000)
    sent = kernels.unpack(kernels.quantise_stochastic(x, 1.0, 11), x.numel())
    assert torch.allclose(sent.view(-1, 4).mean(0), x[:4], atol=0.01)


def test_dispatch() -> None:
    assert backend(torch.zeros(1)) is reference
    if torch.cuda.is_available():
        assert backend(torch.zeros(1, device="cuda:0")) is not reference


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
            lambda x: kernels.quantise_stochastic(x, 1.0, 0, residual=x[1:]),
            "residual: 7 elements; must be 8",
        ),
        (lambda x: kernels.unpack(x.byte(), 8), "codes: 8 bytes; must be 2 for 8 elements"),
        (lambda x: kernels.unpack(x.byte(), -1), "numel: -1"),
        (lambda x: kernels.accumulate(x, x[1:]), "source: 7 elements, but target has 8"),
        (lambda x: kernels.accumulate(x, x, float("nan")), "weight: nan; must be a finite"),
        (lambda x: kernels.uniform(0, x), "indices: .*contiguous vector of int64"),
    ],
)
def test_bad_arguments_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(8))  # type: ignore[operator]
