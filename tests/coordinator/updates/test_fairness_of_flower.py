"""q-FedAvg against the formulas of Flower, where they agree, and where they do not.

Formulas of adap/flower at fdef7af, framework/py/flwr/serverapp/strategy/qfedavg.py:
compute_delta_and_h and aggregate_train; written here in float64, as that computes in the type of
the weights.
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from stratagem.coordinator.updates.weighing.fair_shares import fair_shares

Rows = NDArray[np.float64]
LR = 0.05


def theirs(base: Rows, rows: Rows, losses: list[float], q: float) -> Rows:
    """aggregate_train: gw - sum(delta) / sum(h)."""
    sum_delta, sum_h = np.zeros_like(base), 0.0
    for row, loss in zip(rows, losses, strict=True):
        grad = (base - row) * (1.0 / LR)
        loss_pow_q = np.float_power(loss + 1e-10, q)
        sum_delta = sum_delta + grad * loss_pow_q
        norm = np.sum(np.square(grad))
        sum_h += q * np.float_power(loss + 1e-10, q - 1) * norm + (1.0 / LR) * loss_pow_q
    return np.asarray(base - sum_delta / sum_h)


def ours(base: Rows, rows: Rows, losses: list[float], q: float) -> Rows:
    squares = ((rows - base) ** 2).sum(axis=1).tolist()
    shares = fair_shares(losses, squares, q, LR)
    return np.asarray(base + np.array(shares) @ (rows - base))


def a_round(num: int) -> tuple[Rows, Rows, list[float]]:
    rng = np.random.default_rng(num)
    rows = rng.standard_normal((num + 1, 60))
    return rows[0], rows[0] + 0.1 * rows[1:], rng.uniform(0.01, 3.0, num).tolist()


@pytest.mark.parametrize("q", [0.0, 0.1, 0.2, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("num", [1, 2, 5, 40])
def test_the_next_state_is_the_same_for_the_same_losses(num: int, q: float) -> None:
    base, rows, losses = a_round(num)
    expected = theirs(base, rows, losses, q)
    np.testing.assert_allclose(ours(base, rows, losses, q), expected, rtol=1e-12)


def test_without_q_both_are_the_mean_of_clients_and_not_of_rows() -> None:
    """Their documentation calls it equivalent to FedAvg, which their FedAvg weighs by
    num-examples."""
    base, rows, losses = a_round(5)
    for found in (theirs(base, rows, losses, 0.0), ours(base, rows, losses, 0.0)):
        np.testing.assert_allclose(found, rows.mean(axis=0), rtol=1e-12)


def test_their_loss_is_that_of_training_and_makes_another_step() -> None:
    """train_loss is what the client has averaged while it trained, when the model was better
    already; the paper's F_k(w) is that of the state that was sent. Who has learned fast counts
    less by theirs."""
    base, rows, before = a_round(3)
    while_training = [loss * share for loss, share in zip(before, (0.2, 0.9, 0.9), strict=True)]
    by_paper = ours(base, rows, before, 1.0) - base
    by_flower = theirs(base, rows, while_training, 1.0) - base
    change = rows[0] - base
    assert by_flower @ change / np.linalg.norm(by_flower) < by_paper @ change / np.linalg.norm(
        by_paper
    )


def test_losses_beyond_the_range_of_their_powers_are_no_obstacle() -> None:
    base, rows, _ = a_round(2)
    with np.errstate(all="ignore"):
        assert not np.isfinite(theirs(base, rows, [1e-9, 1e-9], 40.0)).all()
    assert np.isfinite(ours(base, rows, [1e-9, 1e-9], 40.0)).all()
