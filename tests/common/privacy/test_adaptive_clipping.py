"""Adaptive clipping against the formulas of its paper."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.privacy.adaptive_clipping import answer_noise, next_norm, sum_noise_multiplier

pytestmark = pytest.mark.core


@given(st.floats(0.01, 10), st.floats(1, 1e6))
def test_both_noised_sums_cost_what_one_with_all_noise_does(
    noise: float, num_expected: float
) -> None:
    of_sum = sum_noise_multiplier(noise, num_expected)
    if noise >= 2 * answer_noise(num_expected):
        assert of_sum is None
        return
    assert of_sum is not None
    together = of_sum**-2 + (2 * answer_noise(num_expected)) ** -2
    assert together == pytest.approx(noise**-2, rel=1e-6)


def test_the_norm_falls_while_more_than_the_quantile_are_within_it_and_settles_there() -> None:
    assert next_norm(2.0, 1.0, 0.5, 0.2) == pytest.approx(2 * math.exp(-0.1))
    assert next_norm(2.0, 0.0, 0.5, 0.2) == pytest.approx(2 * math.exp(0.1))
    assert next_norm(2.0, 0.5, 0.5, 0.2) == 2.0
    # An accident of the noise does not throw it away.
    assert next_norm(1.0, -1e9, 0.5, 0.2) == math.exp(8)
    assert next_norm(1.0, 1e9, 0.5, 0.2) == math.exp(-8)
    assert answer_noise(100) == 5, "a twentieth of the clients, as the paper recommends"
    norms, norm = [float(n) for n in range(1, 101)], 1.0
    for _ in range(400):
        norm = next_norm(norm, sum(n <= norm for n in norms) / 100, 0.5, 0.2)
    assert 48 <= norm <= 53
