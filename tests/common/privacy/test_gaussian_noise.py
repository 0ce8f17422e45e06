"""Noise from keys: equal for equal keys however it is drawn, independent for others, normal."""

import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.privacy.noise import derived_key, rounded_to_grid, standard_normal, uniform

pytestmark = pytest.mark.core

KEY = derived_key(bytes(range(32)), ["run", "1", "weight"])


def plain_normal(key: bytes, index: int) -> float:
    """One element as the module's text says it."""
    encryptor = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    block = encryptor.update(index.to_bytes(16, "big"))
    first = 1 - (int.from_bytes(block[:8], "little") >> 11) / 2**53
    second = (int.from_bytes(block[8:], "little") >> 11) / 2**53
    return math.sqrt(-2 * math.log(first)) * math.cos(2 * math.pi * second)


@settings(max_examples=40)
@given(st.integers(0, 10**12), st.integers(0, 40))
def test_each_element_is_that_of_its_block_wherever_drawing_begins(start: int, num: int) -> None:
    drawn = standard_normal(KEY, start, num)
    plain = [plain_normal(KEY, start + i) for i in range(num)]
    np.testing.assert_allclose(drawn, plain, rtol=1e-12, atol=1e-15)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=4))
def test_pieces_of_any_size_make_the_same_noise(sizes: list[int]) -> None:
    whole = standard_normal(KEY, 5, sum(sizes))
    starts = np.cumsum([5, *sizes])
    pieces = [standard_normal(KEY, int(a), n) for a, n in zip(starts, sizes, strict=False)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_noise_is_normal_and_finite_of_uniform_draws() -> None:
    """Kolmogorov and Smirnov's distance of 200,000 elements to N(0, 1) is below its 0.1 % level."""
    drawn = np.sort(standard_normal(KEY, 0, 200_000))
    expected = np.array([math.erfc(-x / math.sqrt(2)) / 2 for x in drawn])
    above = np.arange(1, drawn.size + 1) / drawn.size - expected
    assert np.abs(above).max() < 1.95 / math.sqrt(drawn.size)
    drawn = uniform(KEY, 0, 200_000)
    assert 0 <= drawn.min() < drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 4 / math.sqrt(12 * drawn.size)
    assert np.isfinite(standard_normal(KEY, 0, 200_000)).all()


@pytest.mark.parametrize(
    "names", [["run", "1", "bias"], ["run", "2", "weight"], ["run1", "weight"]]
)
def test_other_names_and_secrets_have_other_keys(names: list[str]) -> None:
    assert derived_key(bytes(range(32)), names) != KEY
    assert derived_key(bytes(32), ["run", "1", "weight"]) != KEY
    apart = np.corrcoef(
        standard_normal(KEY, 0, 50_000),
        standard_normal(derived_key(bytes(range(32)), names), 0, 50_000),
    )[0, 1]
    assert abs(apart) < 5 / math.sqrt(50_000)
    # Nor are names run together.
    assert derived_key(bytes(32), ["ab", "c"]) != derived_key(bytes(32), ["a", "bc"])


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e3))
def test_a_noised_sum_is_a_multiple_of_a_millionth_of_the_noise(value: float, sigma: float) -> None:
    rounded = float(rounded_to_grid(np.array([value]), sigma)[0])
    grid = 2.0 ** (math.floor(math.log2(sigma)) - 20)
    assert sigma * 2**-21 < grid <= sigma * 2**-20
    assert rounded % grid == 0
    assert abs(rounded - value) <= grid / 2
