"""The state machine: what follows what, for all lengths, and what is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.job.schedules import PhasesSpec
from stratagem.common.numerics.rules import CURRENT, FIRST
from stratagem.worker.phases import schedule
from stratagem.worker.phases.schedule import (
    Lengths,
    LossHistory,
    PhaseError,
    Quality,
    State,
    TrainingPhase,
    adapted,
    after_failed_check,
    begin,
    dump_state,
    end,
    initial,
    load_state,
)
from stratagem.worker.phases.training import Seconds, news_of, statistics_of, trends_of

pytestmark = pytest.mark.core

GOOD, BAD = Quality(0.0, 1.0), Quality(5.0, -1.0)
F, P, C = TrainingPhase.FULL, TrainingPhase.PREDICT, TrainingPhase.CORRECT
FIXED = {"enabled": False}


def spec_of(full: int, predict: int, every: int, **changes: object) -> PhasesSpec:
    return PhasesSpec.parse(
        {
            "full_steps": full,
            "predict_steps": predict,
            "correct_every": every,
            "adaptive": FIXED,
            **changes,
        }
    )


def step(state: State, spec: PhasesSpec, check: Quality = GOOD, loss: float = 1.0) -> State:
    state = begin(state, spec)
    if state.phase is P:
        return end(state, spec)
    is_due = schedule.check_due(state) or schedule.back_test_due(state, spec)
    return end(state, spec, loss, (check,) if is_due else ())


def phases_of(spec: PhasesSpec, num_steps: int, check: Quality = GOOD) -> str:
    state, seen = initial(spec), ""
    for _ in range(num_steps):
        state = step(state, spec, check)
        seen += state.phase[0]
    return seen


def test_budgets_count_predictions_and_the_last_correction_is_left_out() -> None:
    assert phases_of(spec_of(2, 4, 2), 14) == "FFPPCPPFFPPCPP"
    assert phases_of(spec_of(2, 3, 1), 9) == "FFPCPCPFF"
    assert phases_of(spec_of(2, 3, 10), 10) == "FFPPPFFPPP"
    default = phases_of(spec_of(10, 40, 10), 53)
    assert (default.count("P"), default.count("C")) == (40, 3)
    assert phases_of(spec_of(2, 0, 2), 6) == "FFFFFF"
    assert phases_of(spec_of(2, 2, 5, warmup_steps=3), 11) == "FFFFFPPFFPP"


lengths = st.tuples(st.integers(2, 9), st.integers(1, 20), st.integers(1, 12))


@given(lengths, st.integers(0, 5))
def test_a_cycle_has_its_full_steps_its_predictions_and_the_corrections(
    chosen: tuple[int, int, int], warmup: int
) -> None:
    full, predict, every = chosen
    spec = spec_of(full, predict, every, warmup_steps=warmup)
    num_corrections = (predict - 1) // every
    length = full + predict + num_corrections
    seen = phases_of(spec, warmup + 3 * length)
    one = seen[warmup : warmup + length]
    assert seen == "F" * warmup + one * 3
    assert (one.count("F"), one.count("P"), one.count("C")) == (full, predict, num_corrections)


@given(lengths, st.lists(st.sampled_from([GOOD, BAD]), min_size=1, max_size=60), st.booleans())
def test_begin_is_idempotent_and_the_text_of_a_state_gives_it_back(
    chosen: tuple[int, int, int], checks: list[Quality], adapts: bool
) -> None:
    full, predict, every = chosen
    spec = spec_of(full, predict, every, adaptive={"enabled": adapts, "window": 2})
    state = initial(spec)
    for index, check in enumerate(checks):
        opened = begin(state, spec)
        assert begin(opened, spec) == opened
        assert load_state(dump_state(opened)) == opened
        assert load_state(dump_state(state)) == state
        state = step(state, spec, check, loss=float(index % 7))
        assert state.total_step == index + 1
        low, high = spec.full_limits
        assert low <= state.lengths.full <= high
        low, high = spec.predict_limits
        assert low <= state.lengths.predict <= high
        assert state.num_since_exact <= every


def test_predict_is_entered_only_after_a_back_test_that_passed() -> None:
    assert phases_of(spec_of(3, 5, 2), 30, BAD) == "F" * 30
    almost = Quality(0.2, 0.7)  # close enough, but not aligned enough
    assert phases_of(spec_of(3, 5, 2, min_correlation=0.8), 9, almost) == "F" * 9
    assert phases_of(spec_of(3, 5, 2, min_correlation=0.6), 9, almost) == "FFFPPCPPC"
    state = initial(spec_of(2, 2, 2))
    for _ in range(2):  # an exact step without a check proves nothing
        state = end(begin(state, spec_of(2, 2, 2)), spec_of(2, 2, 2), 1.0)
    assert begin(state, spec_of(2, 2, 2)).phase is F
    assert begin(state, spec_of(2, 2, 2)).num_refused == 1


def test_a_correction_that_fails_gives_the_cycle_up() -> None:
    spec = spec_of(2, 6, 2)
    state = initial(spec)
    for _ in range(4):
        state = step(state, spec)
    assert begin(state, spec).phase is C
    state = step(state, spec, BAD)
    assert (begin(state, spec).phase, state.num_fallbacks) == (F, 1)
    assert begin(state, spec).cycle == 1


def test_a_loss_that_jumps_gives_the_cycle_up_whatever_the_gradient_says() -> None:
    spec = spec_of(4, 6, 2, adaptive={"enabled": False, "window": 3})
    state = initial(spec)
    for loss in (1.0, 0.9, 1.1, 1.0):
        state = step(state, spec, loss=loss)
    state = step(step(state, spec), spec)
    assert begin(step(state, spec, loss=1.1), spec).phase is P
    assert begin(step(state, spec, loss=9.0), spec).phase is F


def test_a_loss_that_diverges_keeps_all_steps_exact_until_it_settles() -> None:
    spec = spec_of(2, 4, 9, adaptive={"enabled": False, "window": 2})
    state, before = initial(spec), initial(spec)
    for loss in (1.0, 1.0):
        state = step(state, spec, loss=loss)
    assert begin(state, spec).phase is P  # too few losses to tell
    for _ in range(4):
        state = step(state, spec)
    for loss in (1.3, 1.3):
        before, state = state, step(state, spec, loss=loss)
    assert begin(state, spec).phase is F
    assert begin(state, spec).num_refused == 1
    assert trends_of(state, spec) == {
        "full_loss": 1.3,
        "full_loss_change": pytest.approx(0.3),
        "is_converging": 0.0,
        "is_diverging": 1.0,
        "refused_cycles": 0.0,
        "phase_fallbacks": 0.0,
    }
    assert "at step 8 the mean loss of the last 2 FULL steps is 30% above" in news_of(
        before, state, spec
    )
    settled = step(state, spec, loss=1.3)
    assert "at step 9 the loss of FULL steps diverges no more" in news_of(state, settled, spec)
    assert begin(step(settled, spec, loss=1.3), spec).phase is P


def test_calls_that_do_not_fit_are_errors() -> None:
    spec = spec_of(2, 4, 2)
    with pytest.raises(PhaseError, match="end_step without begin_step"):
        end(initial(spec), spec, 1.0)
    with pytest.raises(PhaseError, match="FULL step computes its gradient"):
        end(begin(initial(spec), spec), spec)
    predicting = begin(step(step(initial(spec), spec), spec), spec)
    assert predicting.phase is P
    with pytest.raises(PhaseError, match="no loss"):
        end(predicting, spec, 1.0)


def test_the_horizon_of_the_back_test_leaves_room_for_a_line() -> None:
    for full, predict, every, expected in ((8, 16, 4, 4), (2, 9, 9, 1), (4, 9, 9, 2), (9, 1, 5, 1)):
        spec = spec_of(full, predict, every)
        state, due = initial(spec), []
        for index in range(full):
            opened = begin(state, spec)
            if schedule.forecast_due(opened, spec):
                due.append(index)
            state = step(state, spec)
        assert schedule.horizon(opened, spec) == expected
        assert due == [full - 1 - expected]


def test_adaptation_moves_lengths_only_the_intended_way() -> None:
    spec = PhasesSpec.parse({"adaptive": {"window": 2}})  # 8 and 16
    lengths = Lengths(8, 16)
    rising, falling = LossHistory((1.0, 1.0, 2.0, 2.0)), LossHistory((2.0, 2.0, 1.0, 1.0))
    assert adapted(lengths, rising, spec) == Lengths(10, 12)
    assert adapted(lengths, falling, spec) == Lengths(7, 18)
    assert adapted(lengths, LossHistory((1.0, 1.0, 1.0, 1.0)), spec) == lengths
    assert adapted(lengths, LossHistory((-1.0,) * 4), spec) == lengths
    assert adapted(lengths, LossHistory((-2.0, -2.0, -1.0, -1.0)), spec) == Lengths(10, 12)
    assert adapted(lengths, LossHistory((1.0, 9.0)), spec) == lengths  # too few to tell
    # Where a length already lies outside its limits it stays: it never moves the other way.
    narrow = PhasesSpec.parse(
        {"full_steps": 60, "predict_steps": 4, "adaptive": {"window": 2, "max_full_steps": 60}}
    )
    assert adapted(Lengths(60, 4), rising, narrow) == Lengths(60, 3)
    assert adapted(Lengths(60, 1), rising, narrow) == Lengths(60, 1)
    assert after_failed_check(lengths, spec) == Lengths(8, 8)
    fixed = PhasesSpec.parse({"adaptive": FIXED})
    assert adapted(lengths, rising, fixed) == after_failed_check(lengths, fixed) == lengths


def test_reset_restores_lengths_and_statistics_say_what_happened() -> None:
    spec = PhasesSpec.parse({"full_steps": 2, "predict_steps": 4, "correct_every": 2})
    state = initial(spec)
    assert statistics_of(state).step_ratio == 1.0
    for _ in range(7):
        state = step(state, spec)
    found = statistics_of(state)
    assert str(found) == "7 steps | 0 cycles | 2.33x | 2 full | 4 predict | 1 correct"
    assert found.average_losses == {F: 1.0, C: 1.0}
    assert initial(spec).lengths == Lengths(2, 4)
    opened = begin(initial(spec), spec)
    assert (opened.total_step, opened.has_changed, opened.phase.is_exact) == (0, True, True)
    assert begin(replace(state, is_open=False), spec).has_changed


def test_a_ratio_of_steps_is_not_a_speedup() -> None:
    seconds = Seconds()
    for _ in range(2):
        seconds = seconds.with_exact(F, forward=1.0, backward=2.0, whole=4.0)
    assert (seconds.cost_speedup, seconds.wall_speedup) == (1.0, 1.0)
    for _ in range(6):
        seconds = seconds.with_predicted(1.0)
    assert seconds.cost_speedup == 8 * 3 / (2 * 3 + 6)  # D5.9: 4x in steps
    assert seconds.wall_speedup == 8 * 4 / (2 * 4 + 6)


def test_text_that_is_no_state_is_refused() -> None:
    for text in ("", "{}", json.dumps({"lengths": [1]})):
        with pytest.raises(InvalidInputError, match="phases/schedule"):
            load_state(text)


def test_a_loss_that_rises_slowly_shortens_prediction() -> None:
    """By 1 % of its first value each step, for 50 steps."""
    spec, losses = PhasesSpec(), LossHistory(tuple(1.0 + 0.01 * step for step in range(50)))
    lengths = Lengths(spec.full_steps, spec.predict_steps)
    shorter = adapted(lengths, losses, spec)
    assert shorter.predict < lengths.predict
    assert shorter.full > lengths.full
    assert adapted(lengths, losses, spec, FIRST) == lengths


@pytest.mark.parametrize(("numerics", "phase"), [(FIRST, P), (CURRENT, F)])
def test_no_gradient_is_predicted_while_the_loss_rises_slowly(
    numerics: int, phase: TrainingPhase
) -> None:
    """Checks pass all the time; the loss of each step lies 1 % of the first above the last one."""
    spec, state = PhasesSpec(), initial(PhasesSpec())
    good = (Quality(0.0, 1.0),)
    phases = []
    for number in range(40):
        state = begin(state, spec, numerics)
        phases.append(state.phase)
        loss = None if state.phase is P else 1.0 + 0.01 * number
        is_due = schedule.check_due(state) or schedule.back_test_due(state, spec)
        state = end(state, spec, loss, good if is_due else (), numerics)
    assert phases[8] is P
    assert phases[35] is phase
