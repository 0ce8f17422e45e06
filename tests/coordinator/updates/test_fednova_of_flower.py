"""FedNova against the baseline of Flower, where they agree, and where they do not.

Formulas of adap/flower at fdef7af, baselines/fednova/fednova: ProxSGD.step and
get_gradient_scaling in models.py, aggregate_fit in strategy.py; written here for numbers.
"""

import pytest

from stratagem.coordinator.updates.weighing.normalized_steps import length_of_steps, nova_factors


def local_norm(num_steps: int, momentum: float, etamu: float) -> float:
    """local_normalizing_vec after so many calls of ProxSGD.step."""
    counter = norm = 0.0
    for _ in range(num_steps):
        if momentum != 0:
            counter = counter * momentum + 1
            norm += counter
        if etamu != 0:
            norm = norm * (1 - etamu) + 1
        if momentum == 0 and etamu == 0:
            norm += 1
    return norm


def scales(ratios: list[float], steps: list[int], momentum: float, etamu: float) -> list[float]:
    """aggregate_fit: tau_eff / local_norm * weight of each client."""
    norms = [local_norm(number, momentum, etamu) for number in steps]
    gone = steps if etamu else norms
    tau_eff = sum(ratio * tau for ratio, tau in zip(ratios, gone, strict=True))
    return [tau_eff / norm * ratio for ratio, norm in zip(ratios, norms, strict=True)]


def ours(rows: list[float], steps: list[int], momentum: float, pull: float) -> list[float]:
    return nova_factors(rows, [length_of_steps(number, momentum, pull) for number in steps])


ROWS, STEPS = [10.0, 30.0, 60.0], [1, 7, 40]
RATIOS = [0.1, 0.3, 0.6]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_changes_count_the_same_with_and_without_momentum(momentum: float) -> None:
    expected = scales(RATIOS, STEPS, momentum, 0.0)
    assert ours(ROWS, STEPS, momentum, 0.0) == pytest.approx(expected, rel=1e-12)


def test_with_the_term_of_fedprox_theirs_go_as_far_as_if_nothing_pulled_them_back() -> None:
    """Each client counts the same share of the step, and the step is longer by one factor."""
    pairs = zip(scales(RATIOS, STEPS, 0.0, 0.1), ours(ROWS, STEPS, 0.0, 0.1), strict=True)
    first, *others = [theirs / own for theirs, own in pairs]
    assert first > 1
    assert others == pytest.approx([first, first], rel=1e-12)
    even = ours(ROWS, [7, 7, 7], 0.0, 0.1)
    assert even == pytest.approx(RATIOS, rel=1e-12)
    assert sum(scales(RATIOS, [7, 7, 7], 0.0, 0.1)) > 1.3
