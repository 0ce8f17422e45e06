"""The pace of a run from what is seen of it, and the time that is left."""

import pytest

from stratagem.coordinator.core.time_left import MIN_MARKS, Pace, epoch_of, steps_per_epoch

pytestmark = pytest.mark.core


def steady(seconds: int, per_s: float = 2.0, *, pace: Pace | None = None, from_s: int = 0) -> Pace:
    """Return the pace of a run that was looked at every second and has done per_s in each."""
    pace = pace or Pace()
    done = pace.marks[-1].done if pace.marks else 0.0
    for number in range(seconds + 1):
        pace = pace.seen(from_s + number, done + per_s * number, trains=True)
    return pace


def test_the_first_ten_seconds_say_nothing() -> None:
    assert steady(10).eta_s(10.9, 1000) is None
    assert steady(11).eta_s(11.0, 1000) == pytest.approx((1000 - 22) / 2)


def test_what_comes_before_the_first_step_is_no_measure_of_the_others() -> None:
    """A cold worker has taken 30 s to the first step; where no other follows soon, it is one."""
    first = Pace().seen(0.0, 0.0, trains=True).seen(30.0, 1.0, trains=True)
    assert first.eta_s(31.0, 101) is None
    assert first.eta_s(40.0, 101) == pytest.approx(100 * 40.0)
    pace = steady(12, pace=first, from_s=30)
    assert pace.eta_s(42.0, 125) == pytest.approx(100 / 2)


def test_what_is_left_is_divided_by_the_pace_of_the_last_minute() -> None:
    slow = steady(100, 1.0)
    fast = steady(60, 10.0, pace=slow, from_s=100)
    assert fast.eta_s(160.0, 1700) == pytest.approx((1700 - 700) / 10)
    assert len(fast.marks) <= 62


def test_an_evaluation_counts_as_time_that_it_takes() -> None:
    """20 s of training at 2 steps per second, then 20 s in which no step is done."""
    pace = steady(20)
    assert pace.eta_s(40.0, 140) == pytest.approx((140 - 40) * 39 / 38)
    looked = pace.seen(40.0, 40.0, trains=True)
    assert looked.eta_s(40.0, 140) == pytest.approx(100 * 39 / 38)


def test_time_without_training_does_not_count_and_has_no_answer() -> None:
    pace = steady(20).seen(20.0, 40.0, trains=False)
    assert pace.eta_s(25.0, 140) is None
    again = pace.seen(1000.0, 40.0, trains=True)
    assert again.eta_s(1000.0, 140) == pytest.approx(50.0)
    assert again.seen(1001.0, 42.0, trains=True).eta_s(1001.0, 142) == pytest.approx(50.0)


def test_a_run_that_goes_back_begins_anew() -> None:
    pace = steady(30).seen(31.0, 10.0, trains=True)
    assert pace.eta_s(45.0, 140) is None, "nothing was gained since"
    assert pace.seen(36.0, 20.0, trains=True).eta_s(36.0, 140) is None, "too short a time"
    assert pace.seen(41.0, 30.0, trains=True).eta_s(41.0, 140) == pytest.approx(110 / 2)


def test_rounds_longer_than_the_window_have_a_pace_all_the_same() -> None:
    pace = Pace()
    for number in range(6):
        pace = pace.seen(300.0 * number, float(number), trains=True)
    assert len(pace.marks) == MIN_MARKS
    assert pace.eta_s(1500.0, 10) == pytest.approx(5 * 300)


@pytest.mark.parametrize(
    ("pace", "total"),
    [(Pace(), 10), (Pace().seen(0.0, 0.0, trains=True), 10), (steady(20), 0)],
    ids=["never seen", "nothing done", "no end"],
)
def test_without_a_pace_or_an_end_nothing_is_said(pace: Pace, total: float) -> None:
    assert pace.eta_s(30.0, total) is None


def test_nothing_is_left_at_the_end_nor_after_it() -> None:
    assert steady(20).eta_s(20.0, 40) == 0.0
    assert steady(20).eta_s(20.0, 30) == 0.0


def test_a_clock_that_stands_still_or_jumps_back_adds_nothing() -> None:
    pace = steady(20).seen(5.0, 42.0, trains=True)
    assert pace.trained_s == 20.0
    assert pace.eta_s(0.0, 142) == pytest.approx(100 * 19 / 40)


def test_marks_close_together_are_one() -> None:
    pace = Pace()
    for number in range(1000):
        pace = pace.seen(number / 100, float(number), trains=True)
    assert len(pace.marks) <= 44
    assert pace.marks[-1].done == 999.0


def test_epochs_are_steps_by_the_steps_of_one() -> None:
    assert steps_per_epoch(1437, 64) == 23
    assert epoch_of(46, 23) == 2.0
    assert epoch_of(0, 23) == 0.0
    assert steps_per_epoch(0, 64) == 0, "of a stream nobody knows the rows"
    assert epoch_of(46, 0) == 0.0
