"""What losses say, also where they are few, equal, zero or negative."""

import random

import pytest

from stratagem.common.numerics.rules import FIRST
from stratagem.worker.phases.schedule import LossHistory

pytestmark = pytest.mark.core


def of(*losses: float) -> LossHistory:
    return LossHistory(losses)


def test_summary_is_of_the_population_and_old_losses_go() -> None:
    found = of(1.0, 2.0, 3.0, 6.0).summary()
    assert found is not None
    assert (found.mean, found.variance, found.median, found.least, found.most) == (
        3,
        3.5,
        2.5,
        1,
        6,
    )
    assert of().summary() is None
    history = LossHistory(capacity=3)
    for loss in range(7):
        history = history.recorded(float(loss))
    assert history.losses == (4.0, 5.0, 6.0)


def test_windows_that_are_not_full_say_nothing() -> None:
    assert of(1.0).rolling_average(2) is None
    assert of(1.0, 2.0, 4.0).rolling_average(2) == 3.0
    assert of(1.0, 2.0, 4.0).change(2) is None
    assert of(4.0).improvement_rate() is None
    assert not of(4.0).is_converging(0.0)


def test_trends_are_relative_also_below_zero() -> None:
    assert of(4.0, 4.0, 1.0, 1.0).is_converging(0.5)
    assert of(-1.0, -4.0).is_converging(0.5)
    assert not of(-4.0, -1.0).is_converging(0.5)
    assert of(-4.0, -1.0).is_diverging(1)
    assert not of(-1.0, -1.0).is_diverging(1)
    assert of(0.0, 1.0).is_diverging(1)
    assert of(2.0, 5.0, 1.0).improvement_rate() == -0.5


def test_a_spike_is_measured_by_what_came_before_it() -> None:
    quiet = (1.0, 1.1, 0.9, 1.0)
    assert of(*quiet, 2.0).is_spike(4)  # with itself in the baseline no window <= 10 ever says so
    assert not of(*quiet, 1.1).is_spike(4)
    assert not of(*quiet, 0.0).is_spike(4)
    assert of(1.0, 1.0, 1.0, 1.5).is_spike(3)  # no deviation at all
    assert not of(1.0, 1.0, 1.0, 1.0).is_spike(3)
    assert not of(1.0, 5.0).is_spike(3)


SLOW = tuple(1.0 + 0.01 * step for step in range(50))
WINDOW = 10


def test_a_slow_rise_is_seen() -> None:
    """By 1 % of the first loss each step: no window of ten lies a tenth above the one before."""
    fast = [LossHistory(SLOW[:num]).change(WINDOW) for num in range(20, 51)]
    assert all(each is not None and each < 0.1 for each in fast)
    rise = LossHistory(SLOW).rise(WINDOW, 0.1)
    assert rise is not None
    assert rise.window > WINDOW
    assert LossHistory(SLOW).is_diverging(WINDOW)
    assert LossHistory(SLOW[:8] + SLOW[27:35]).is_diverging(WINDOW)  # as FULL steps see it
    assert LossHistory(SLOW).rise(WINDOW, 0.1, FIRST) is None
    assert not LossHistory(SLOW).is_diverging(WINDOW, FIRST)


def test_what_has_settled_or_falls_or_is_noise_is_no_rise() -> None:
    assert not LossHistory((*SLOW, *[SLOW[-1]] * 20)).is_diverging(WINDOW)
    assert LossHistory((*SLOW, *reversed(SLOW))).rise(WINDOW, 0.1) is None
    assert LossHistory(tuple(reversed(SLOW))).rise(WINDOW, 0.05) is None
    generator = random.Random(5)
    for num in range(100):
        noise = tuple(1.0 + generator.uniform(-0.3, 0.3) for _ in range(num))
        rise = LossHistory(noise).rise(WINDOW, 0.2)
        assert rise is None or rise.window == WINDOW


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_slow_rise_of_negative_losses_is_one_too(sign: float) -> None:
    losses = LossHistory(tuple(sign * 2.0 + 0.02 * step for step in range(50)))
    assert losses.rise(WINDOW, 0.1) is not None


def test_losses_whose_squares_are_no_numbers_rise_like_others() -> None:
    losses = [1 + 0.01 * step for step in range(60)]
    plain, large = of(*losses), of(*(1e200 * each for each in losses))
    found, expected = large.rise(5, 0.2), plain.rise(5, 0.2)
    assert found is not None
    assert expected is not None
    assert found.window == expected.window
    assert found.change == pytest.approx(expected.change)
