"""What losses say, also where they are few, equal, zero or negative."""

import pytest

from stratagem.worker.phases.loss_history import LossHistory

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
