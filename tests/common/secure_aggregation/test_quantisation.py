"""Changes become whole numbers whose sum is exact, whatever the order and the number of clients."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.secure_aggregation.quantisation import Quantisation


def quantised(rule: Quantisation, changes: list[float], weight: int = 1) -> np.ndarray:
    words = np.zeros(len(changes), rule.word)
    rule.quantise(np.array(changes, np.float64), weight, words)
    return words


def test_a_change_is_clipped_scaled_and_rounded_to_even() -> None:
    rule = Quantisation(clip=7.0, bits=4, num_clients=3)
    words = quantised(rule, [0.0, 0.5, 1.5, -2.5, 9.0, -9.0])
    assert words.view("<i4").tolist() == [0, 0, 2, -2, 7, -7]


@pytest.mark.parametrize(
    ("clients", "weight", "bits", "word"),
    [
        (4096, 1, 20, "<u4"),
        (4097, 1, 20, "<u8"),
        (3, 1, 32, "<u8"),
        (3, 1000, 20, "<u4"),
        (10, 1000, 20, "<u8"),
    ],
)
def test_the_modulus_is_the_least_that_holds_the_sum(
    clients: int, weight: int, bits: int, word: str
) -> None:
    assert Quantisation(8.0, bits, clients, weight).word == np.dtype(word)


def test_a_sum_beyond_64_bits_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="does not fit into 64 bits"):
        Quantisation(8.0, 32, 1 << 20, 1 << 20)


@given(
    st.integers(2, 32),
    st.lists(st.lists(st.floats(-20, 20), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(1, 1000),
)
def test_the_mean_of_sums_is_that_of_exact_arithmetic(
    bits: int, changes: list[list[float]], weight: int
) -> None:
    rule = Quantisation(8.0, bits, len(changes), weight)
    total = np.zeros(3, rule.word)
    exact = [Fraction(0)] * 3
    for change in changes:
        total += quantised(rule, change, weight)
        for place, value in enumerate(change):
            scaled = np.clip(np.float64(value), -8.0, 8.0) * rule.scale
            exact[place] += weight * int(np.rint(scaled))
    mean = rule.mean(total, weight * len(changes))
    divisor = rule.scale * (weight * len(changes))
    assert mean.tolist() == [float(each) / divisor for each in exact]


def test_a_sum_that_is_still_masked_is_out_of_range() -> None:
    rule = Quantisation(8.0, 20, 3)
    with pytest.raises(ValueError, match="range"):
        rule.mean(np.array([1 << 30], rule.word), 3)


def test_no_elements_have_a_mean() -> None:
    assert Quantisation(8.0, 20, 3).mean(np.zeros(0, "<u4"), 3).size == 0
