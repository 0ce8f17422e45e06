"""Element types against torch and against exact arithmetic."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.coordinator.updates.floats import is_finite, narrow, storage, widen

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
SMALL = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def all_codes(dtype: str) -> np.ndarray:
    """Every pattern of bits, as an unsigned integer."""
    size = storage(dtype).itemsize
    return np.arange(2 ** (8 * size)).astype(f"u{size}")


def as_torch(dtype: str, raw: np.ndarray) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw.tobytes()), dtype=getattr(torch, dtype))


def widened(dtype: str, raw: np.ndarray) -> np.ndarray:
    out = np.empty(raw.shape)
    widen(dtype, raw.view(storage(dtype)), out)
    return out


def narrowed(dtype: str, values: np.ndarray) -> np.ndarray:
    out = np.empty(values.shape, storage(dtype))
    narrow(dtype, values, out)
    return out


def as_codes(raw: np.ndarray) -> np.ndarray:
    return raw.view(f"u{raw.itemsize}")


@pytest.mark.parametrize("dtype", SMALL)
def test_every_code_is_that_of_torch_and_survives_the_way_there_and_back(dtype: str) -> None:
    codes = all_codes(dtype)
    values = as_torch(dtype, codes).double().numpy()
    np.testing.assert_array_equal(widened(dtype, codes), values)
    raw, finite = codes.view(storage(dtype)), np.isfinite(values)
    few = np.unique(np.linspace(0, len(raw) - 1, 2000).astype(int))
    edges = np.flatnonzero(finite[1:] != finite[:-1])
    for place in {*few.tolist(), *edges.tolist(), *(edges + 1).tolist()}:
        assert is_finite(dtype, raw[place : place + 1]) == finite[place]
    assert is_finite(dtype, raw[finite])
    found = as_codes(narrowed(dtype, values[finite]))
    np.testing.assert_array_equal(found, codes[finite])


@pytest.mark.parametrize("dtype", SMALL)
def test_the_middle_of_two_neighbours_goes_to_the_even_one_and_a_hair_decides(dtype: str) -> None:
    codes = all_codes(dtype)
    codes = codes[: len(codes) // 2]  # magnitudes
    codes = codes[np.isfinite(widened(dtype, codes))]
    values = widened(dtype, codes)
    middles = (values[:-1] + values[1:]) / 2
    lower, upper = codes[:-1], codes[1:]
    for sign_bit, sign in ((0, 1.0), (1 << (8 * codes.itemsize - 1), -1.0)):
        bit = codes.dtype.type(sign_bit)
        even = np.where(lower % 2 == 0, lower, upper) | bit
        np.testing.assert_array_equal(as_codes(narrowed(dtype, sign * middles)), even)
        below, above = np.nextafter(middles, 0), np.nextafter(middles, np.inf)
        np.testing.assert_array_equal(as_codes(narrowed(dtype, sign * below)), lower | bit)
        np.testing.assert_array_equal(as_codes(narrowed(dtype, sign * above)), upper | bit)


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_finds_one_bad_value_anywhere(dtype: str) -> None:
    good = narrowed(dtype, np.linspace(-3, 3, 37))
    assert is_finite(dtype, good)
    assert is_finite(dtype, good[:0])
    worst = torch.tensor([float("nan")], dtype=getattr(torch, dtype))
    bad = np.frombuffer(bytes(worst.view(torch.uint8).tolist()), storage(dtype))
    for at in (0, 17, 36):
        spoiled = good.copy()
        spoiled[at] = bad[0]
        assert not is_finite(dtype, spoiled)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@settings(max_examples=25)
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=9))
def test_native_types_are_rounded_as_torch_does(dtype: str, values: list[float]) -> None:
    expected = torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype))
    np.testing.assert_array_equal(narrowed(dtype, np.array(values)), expected.numpy())
