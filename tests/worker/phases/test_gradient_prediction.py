"""Extrapolation against numpy's least squares, its damping, the trust region, and stability."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.job.schedules import PhasesSpec, PredictorSpec
from stratagem.worker.phases.prediction import GradientHistory, coefficients, quality
from stratagem.worker.phases.schedule import Quality
from tests.worker.phases.bowl import sgd_steps, steps_to_converge

pytestmark = pytest.mark.core

WLS, MOMENTUM = PredictorSpec(), PredictorSpec(kind="momentum")


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=6, unique=True),
    st.integers(1, 12),
    st.floats(0.5, 1.0),
)
def test_least_squares_is_numpys_with_true_distances(
    steps: list[int], ahead: int, decay: float
) -> None:
    steps.sort()
    spec = PredictorSpec(decay=decay, damping=1.0, history=6)
    values = np.sin(np.arange(len(steps)) * 1.7) + 0.3
    times = np.array(steps, dtype=float) - steps[-1]
    slope, base = np.polyfit(times, values, 1, w=np.sqrt(decay**-times))
    found = np.dot(coefficients(spec, steps, steps[-1] + ahead), values)
    assert found == pytest.approx(base + slope * ahead, rel=1e-6, abs=1e-6)


def test_momentum_uses_the_distance_between_its_gradients() -> None:
    exact = PredictorSpec(kind="momentum", momentum=1.0)
    assert coefficients(exact, [3, 7], 9) == [-0.5, 1.5]  # two steps on, of four between
    assert coefficients(exact, [7], 9) == [1.0]
    assert coefficients(MOMENTUM, [6, 7], 9) == pytest.approx([-1.71, 2.71])


@pytest.mark.parametrize("spec", [WLS, MOMENTUM], ids=["wls", "momentum"])
def test_a_slope_is_followed_a_bounded_way(spec: PredictorSpec) -> None:
    far, further = (coefficients(spec, [0, 1], target) for target in (1000, 2000))
    assert far == pytest.approx(further)
    assert sum(far) == pytest.approx(1.0)  # a constant gradient is predicted as it is
    assert max(map(abs, far)) < 11


def test_nonsense_is_refused() -> None:
    for steps, target in (([], 1), ([2, 2], 3), ([1, 2], 2)):
        with pytest.raises(ValueError):
            coefficients(WLS, steps, target)


def test_predictions_do_not_change_the_history_and_stay_in_the_trust_region() -> None:
    history = GradientHistory(PredictorSpec(damping=1.0), trust=1.5)
    for step, value in enumerate((1.0, 2.0, 3.0)):
        history.record(step, torch.full((7,), value))
    torch.testing.assert_close(history.predict(3), torch.full((7,), 4.0))
    assert torch.equal(history.predict(9), history.predict(9))
    torch.testing.assert_close(history.predict(9), torch.full((7,), 4.5))  # 1.5 times the last
    with pytest.raises(ValueError, match="step 2 comes after step 2"):
        history.record(2, torch.zeros(7))
    for step in range(3, 9):
        history.record(step, torch.full((7,), float(step)))
    assert history.steps == [5, 6, 7, 8]
    assert [gradient[0].item() for gradient in history.gradients] == [5, 6, 7, 8]


def test_quality_is_relative() -> None:
    a = torch.tensor([3.0, 4.0])
    assert quality(a, a) == Quality(0.0, 1.0)
    assert quality(a, -a) == pytest.approx((2.0, -1.0))
    orthogonal = quality(a * 1e-30, torch.tensor([4.0, -3.0]) * 1e-30)
    assert orthogonal == pytest.approx((math.sqrt(2), 0.0), abs=1e-6)
    assert quality(torch.zeros(2), torch.zeros(2)) == Quality(0.0, 1.0)
    assert quality(a, torch.zeros(2)) == Quality(1.0, 0.0)
    assert quality(torch.zeros(2), a).relative_error >= 1e9
    assert not quality(torch.tensor([math.inf]), torch.ones(1)).passes(PhasesSpec())
    assert quality(torch.empty(0), torch.empty(0)) == Quality(0.0, 1.0)


CONFIGURATIONS = {
    "default": {},
    "momentum": {"predictor": {"kind": "momentum"}},
    "fixed lengths": {"adaptive": {"enabled": False}},
    "10/40/10": {"full_steps": 10, "predict_steps": 40, "correct_every": 10},
    "2/4/2": {"full_steps": 2, "predict_steps": 4, "correct_every": 2},
    "5/20/5, lenient": {
        "full_steps": 5,
        "predict_steps": 20,
        "correct_every": 5,
        "max_relative_error": 0.5,
        "adaptive": {"enabled": False},
    },
}
"""Each with the most steps that it may need, per step of gradient descent: measured, and rounded
up. Constant predictions that nobody checks diverge at 10/40/10 for q of 0.11 to 0.49, from 1.22."""
MOST = {"default": 1.1, "momentum": 1.1, "fixed lengths": 1.1}


@pytest.mark.parametrize(
    "points", [20, pytest.param(60, marks=pytest.mark.sweep)], ids=["coarse", "fine"]
)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_converges_on_a_bowl_wherever_gradient_descent_does(name: str, points: int) -> None:
    spec = PhasesSpec.parse(CONFIGURATIONS[name])
    savings = []
    for number in range(1, points):
        # Step length times curvature: gradient descent converges below 2.
        q = 2 * number / points
        plain = sgd_steps(q)
        found = steps_to_converge(spec, [q], most=2 * plain + spec.full_steps + 5)
        assert found.steps <= MOST.get(name, 1.7) * plain + spec.full_steps, q
        savings.append(plain / found.exact_steps)
    assert max(savings) > 1.5


def test_converges_where_curvatures_differ_and_saves_where_it_can() -> None:
    for qs, most_exact in (([1.9, 0.01], 1.0), ([0.5, 0.05], 0.6), ([1.5, 0.3, 0.02], 0.75)):
        plain = max(map(sgd_steps, qs))
        found = steps_to_converge(PhasesSpec(), qs, most=2 * plain)
        assert found.steps <= 1.1 * plain
        assert found.exact_steps <= most_exact * plain
