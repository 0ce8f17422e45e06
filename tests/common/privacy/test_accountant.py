"""The accountant against values of the literature, closed forms, and its own calibration."""

import logging
import math

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.privacy import accountant
from stratagem.common.privacy.accountant import calibrated_noise, epsilon_after

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not accountant.is_installed(), reason="needs the extra privacy"),
]


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """Delta of the Gaussian mechanism of sensitivity 1 (Balle and Wang 2018, Theorem 8)."""

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    a, b = 1 / (2 * sigma), epsilon * sigma
    return phi(a - b) - math.exp(epsilon) * phi(-a - b)


def test_100_sampled_rounds_cost_7_05() -> None:
    """z = 1, q = 0.1, delta = 1e-5: a loose bound would stop runs early, a wrong one late."""
    assert epsilon_after(100, 1.0, 0.1, 1e-5) == pytest.approx(7.0466, abs=1e-3)


@pytest.mark.sweep
def test_the_library_says_the_same_and_renyi_accounting_more() -> None:
    import dp_accounting
    from dp_accounting import pld, rdp

    epsilon = epsilon_after(100, 1.0, 0.1, 1e-5)
    logging.getLogger("absl").setLevel(logging.ERROR)
    a_round = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0))
    # What the library's own accountant says, which computes the round anew for each answer.
    own = pld.PLDAccountant().compose(a_round, 100).get_epsilon(1e-5)
    assert epsilon == pytest.approx(own, rel=1e-9)
    renyi = rdp.RdpAccountant().compose(a_round, 100).get_epsilon(1e-5)
    assert epsilon < renyi == pytest.approx(7.9039, abs=1e-3)


@pytest.mark.parametrize(("num_rounds", "noise"), [(1, 1.0), (4, 2.0), (100, 10.0), (7, 0.5)])
def test_unsampled_rounds_cost_what_one_of_less_noise_does(num_rounds: int, noise: float) -> None:
    epsilon = epsilon_after(num_rounds, noise, 1.0, 1e-5)
    assert gaussian_delta(noise / math.sqrt(num_rounds), epsilon) == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.sweep
def test_sampling_that_leaves_nobody_out_costs_what_no_sampling_does() -> None:
    sampled = epsilon_after(3, 2.0, 0.999999, 1e-5)
    assert sampled == pytest.approx(epsilon_after(3, 2.0, 1.0, 1e-5), rel=1e-3)


def test_epsilon_grows_with_rounds_and_falls_with_noise_and_delta() -> None:
    assert epsilon_after(0, 1.0, 0.1, 1e-5) == 0.0
    epsilon = epsilon_after(10, 1.0, 1.0, 1e-5)
    assert epsilon < epsilon_after(11, 1.0, 1.0, 1e-5)
    assert epsilon > epsilon_after(10, 2.0, 1.0, 1e-5)
    assert epsilon > epsilon_after(10, 1.0, 1.0, 1e-4)


@pytest.mark.parametrize(("num_rounds", "epsilon"), [(1, 40.0), (20, 0.3), (3000, 3.0)])
def test_calibrated_noise_is_the_least_for_the_budget(num_rounds: int, epsilon: float) -> None:
    noise = calibrated_noise(epsilon, 1e-5, num_rounds, 1.0)
    assert epsilon_after(num_rounds, noise, 1.0, 1e-5) <= epsilon
    assert epsilon_after(num_rounds, noise - 0.001, 1.0, 1e-5) > epsilon


@pytest.mark.parametrize("sampled_at", [1.0, pytest.param(0.25, marks=pytest.mark.sweep)])
def test_noise_of_sampled_rounds_is_the_least(
    sampled_at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is found with few evaluations, each of which takes a second if it samples."""
    asked: list[float] = []

    def counted(num_rounds: int, noise: float, rate: float, delta: float) -> float:
        asked.append(noise)
        assert rate == 0.25
        return epsilon_after(num_rounds, noise, sampled_at, delta)

    monkeypatch.setattr(accountant, "epsilon_after", counted)
    noise = calibrated_noise(3.0, 1e-5, 20, 0.25)
    assert len(set(asked)) <= 7
    assert counted(20, noise, 0.25, 1e-5) <= 3.0 < counted(20, noise - 0.001, 0.25, 1e-5)


def test_a_curve_that_no_line_fits_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epsilon 0 has no logarithm, and a step between two levels no slope."""
    levels = {True: 5.0, False: 0.0}
    monkeypatch.setattr(accountant, "epsilon_after", lambda _n, noise, _q, _d: levels[noise < 2.5])
    assert calibrated_noise(3.0, 1e-5, 20, 0.25) == 2.5
    levels[False] = 2.999999
    assert calibrated_noise(3.0, 1e-5, 20, 0.25) == 2.5


def test_a_budget_out_of_reach_is_refused_with_what_would_be_spent() -> None:
    with pytest.raises(InvalidInputError, match=r"0\.0001 is out of reach: 9 rounds"):
        calibrated_noise(1e-4, 1e-9, 9, 1.0)
    # And the journal says which accountant it was.
    assert accountant.accountant_version().startswith("dp-accounting 0.")
