"""Rules of folding against the formulas of Flower: where they agree, and where they do not.

Formulas of adap/flower, written here in float64, as theirs compute in the type of the weights:
src/py/flwr/server/strategy/aggregate.py at 00cd859 (aggregate_median, _trim_mean, aggregate_krum,
aggregate_bulyan), framework/py/flwr/serverapp/strategy/qfedavg.py at fdef7af (compute_delta_and_h,
aggregate_train), and baselines/fednova/fednova at fdef7af (ProxSGD.step, get_gradient_scaling,
aggregate_fit).
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from stratagem.common.strategy import Krum, MultiKrum, TrimmedMean
from stratagem.coordinator.updates.robust import (
    mean_around_median,
    median,
    trimmed_mean,
    verdict_on,
)
from stratagem.coordinator.updates.weighing import fair_shares, length_of_steps, nova_factors

Rows = NDArray[np.float64]

# ---- robust rules ----


def updates(num: int) -> Rows:
    return np.random.default_rng(0).standard_normal((num, 60))


def krum_scores(rows: Rows, num_malicious: int) -> list[float]:
    """aggregate_krum: the sum over the max(1, n - f - 2) closest others of norm(w_i - w_j) ** 2."""
    num_closest = max(1, len(rows) - num_malicious - 2)
    distances = np.array([[np.linalg.norm(a - b) ** 2 for b in rows] for a in rows])
    return [float(np.sort(each)[1 : num_closest + 1].sum()) for each in distances]


def test_the_median_is_the_same() -> None:
    for num in (3, 4, 7, 10):
        rows = updates(num)
        assert np.array_equal(median(list(rows.copy())), np.median(rows, axis=0))


def test_the_trimmed_mean_is_the_same_but_for_the_order_of_the_sum() -> None:
    for num, share in ((5, 0.2), (7, 0.2), (10, 0.3), (11, 0.45)):
        rows, cut = updates(num), int(share * num)
        theirs = np.sort(rows, axis=0)[cut : num - cut].mean(axis=0)
        ours = trimmed_mean(TrimmedMean(share).num_trimmed(num))(list(rows.copy()))
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    # A share that binary numbers round down trims one more than theirs.
    assert (int(0.29 * 100), TrimmedMean(0.29).num_trimmed(100)) == (28, 29)


def test_krum_chooses_the_same_update() -> None:
    for num, num_false in ((5, 1), (7, 2), (12, 3)):
        rows = updates(num)
        theirs = krum_scores(rows, num_false)
        found = verdict_on(Krum(num_false), rows @ rows.T)
        np.testing.assert_allclose(found.scores, theirs, rtol=1e-12)
        assert found.weights.index(1.0) == int(np.argmin(theirs))


def test_multi_krum_keeps_the_same_updates_and_counts_each_as_one() -> None:
    """Theirs goes through `aggregate`, which weighs by num_examples: what a client says of
    itself."""
    rows = updates(9)
    kept = np.argsort(krum_scores(rows, 2))[:4]
    found = verdict_on(MultiKrum(2, 4), rows @ rows.T)
    assert {place for place, weight in enumerate(found.weights) if weight} == set(kept.tolist())
    assert set(found.weights) == {0.0, 1.0}


def test_the_second_half_of_bulyan_is_the_same_where_nothing_ties() -> None:
    """Theirs takes the beta values nearest to the median by argpartition, so ties fall anyhow."""
    rows, num_false = updates(7), 1
    num_kept = len(rows) - 2 * num_false
    away = np.abs(rows - np.median(rows, axis=0))
    nearest = np.take_along_axis(rows, np.argsort(away, axis=0), axis=0)[:num_kept]
    ours = mean_around_median(2 * num_false)(list(rows.copy()))
    np.testing.assert_allclose(ours, nearest.mean(axis=0), rtol=1e-12, atol=1e-15)


# ---- q-FedAvg ----

LR = 0.05


def fair_by_flower(base: Rows, rows: Rows, losses: list[float], q: float) -> Rows:
    """aggregate_train: gw - sum(delta) / sum(h)."""
    sum_delta, sum_h = np.zeros_like(base), 0.0
    for row, loss in zip(rows, losses, strict=True):
        grad = (base - row) * (1.0 / LR)
        loss_pow_q = np.float_power(loss + 1e-10, q)
        sum_delta = sum_delta + grad * loss_pow_q
        norm = np.sum(np.square(grad))
        sum_h += q * np.float_power(loss + 1e-10, q - 1) * norm + (1.0 / LR) * loss_pow_q
    return np.asarray(base - sum_delta / sum_h)


def fair(base: Rows, rows: Rows, losses: list[float], q: float) -> Rows:
    squares = ((rows - base) ** 2).sum(axis=1).tolist()
    shares = fair_shares(losses, squares, q, LR)
    return np.asarray(base + np.array(shares) @ (rows - base))


def a_round(num: int) -> tuple[Rows, Rows, list[float]]:
    rng = np.random.default_rng(num)
    rows = rng.standard_normal((num + 1, 60))
    return rows[0], rows[0] + 0.1 * rows[1:], rng.uniform(0.01, 3.0, num).tolist()


def test_the_next_state_is_the_same_for_the_same_losses() -> None:
    """Without q it is the mean of clients and not of rows, which their documentation calls
    equivalent to FedAvg, which their FedAvg weighs by num-examples."""
    for num, q in ((1, 0.1), (1, 2.0), (2, 1.0), (5, 0.0), (5, 5.0), (40, 0.2), (40, 1.0)):
        base, rows, losses = a_round(num)
        expected, found = fair_by_flower(base, rows, losses, q), fair(base, rows, losses, q)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        if q == 0.0:
            np.testing.assert_allclose(found, rows.mean(axis=0), rtol=1e-12)


# ---- FedNova ----

ROWS, STEPS, RATIOS = [10.0, 30.0, 60.0], [1, 7, 40], [0.1, 0.3, 0.6]


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


def scales(steps: list[int], momentum: float, etamu: float) -> list[float]:
    """aggregate_fit: tau_eff / local_norm * weight of each client."""
    norms = [local_norm(number, momentum, etamu) for number in steps]
    gone = steps if etamu else norms
    tau_eff = sum(ratio * tau for ratio, tau in zip(RATIOS, gone, strict=True))
    return [tau_eff / norm * ratio for ratio, norm in zip(RATIOS, norms, strict=True)]


def normalized(steps: list[int], momentum: float, pull: float) -> list[float]:
    return nova_factors(ROWS, [length_of_steps(number, momentum, pull) for number in steps])


def test_changes_count_the_same_with_and_without_momentum() -> None:
    for momentum in (0.0, 0.5, 0.9):
        expected = scales(STEPS, momentum, 0.0)
        assert normalized(STEPS, momentum, 0.0) == pytest.approx(expected, rel=1e-12)


def test_with_the_term_of_fedprox_theirs_go_as_far_as_if_nothing_pulled_them_back() -> None:
    """Each client counts the same share of the step, and the step is longer by one factor."""
    pairs = zip(scales(STEPS, 0.0, 0.1), normalized(STEPS, 0.0, 0.1), strict=True)
    first, *others = [theirs / own for theirs, own in pairs]
    assert first > 1
    assert others == pytest.approx([first, first], rel=1e-12)
    even = [7, 7, 7]
    assert normalized(even, 0.0, 0.1) == pytest.approx(RATIOS, rel=1e-12)
    assert sum(scales(even, 0.0, 0.1)) > 1.3
