"""Robust rules against the formulas of Flower, where they agree, and where they do not.

Formulas of adap/flower at 00cd859, src/py/flwr/server/strategy/aggregate.py: aggregate_median,
_trim_mean, aggregate_krum with _compute_distances, and aggregate_bulyan; written here in float64,
as that computes in the type of the weights.
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from stratagem.common.strategy import Krum, MultiKrum, TrimmedMean
from stratagem.coordinator.updates.robust.row_statistics import (
    mean_around_median,
    median,
    trimmed_mean,
)
from stratagem.coordinator.updates.robust.verdict import verdict_on

Rows = NDArray[np.float64]


def updates(num: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).standard_normal((num, 60))


def distances(rows: Rows) -> Rows:
    """_compute_distances: norm(w_i - w_j) ** 2."""
    return np.array([[np.linalg.norm(a - b) ** 2 for b in rows] for a in rows])


def krum_scores(rows: Rows, num_malicious: int) -> list[float]:
    """aggregate_krum: the sum over the max(1, n - f - 2) closest others."""
    num_closest = max(1, len(rows) - num_malicious - 2)
    return [float(np.sort(each)[1 : num_closest + 1].sum()) for each in distances(rows)]


@pytest.mark.parametrize("num", [3, 4, 7, 10])
def test_the_median_is_the_same(num: int) -> None:
    rows = updates(num)
    assert np.array_equal(median(list(rows.copy())), np.median(rows, axis=0))


@pytest.mark.parametrize(("num", "share"), [(5, 0.2), (7, 0.2), (10, 0.3), (11, 0.45)])
def test_the_trimmed_mean_is_the_same_but_for_the_order_of_the_sum(num: int, share: float) -> None:
    rows, cut = updates(num), int(share * num)
    theirs = np.sort(rows, axis=0)[cut : num - cut].mean(axis=0)
    ours = trimmed_mean(TrimmedMean(share).num_trimmed(num))(list(rows.copy()))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15)


def test_a_share_that_binary_numbers_round_down_trims_one_more_than_theirs() -> None:
    assert int(0.29 * 100) == 28
    assert TrimmedMean(0.29).num_trimmed(100) == 29


@pytest.mark.parametrize(("num", "num_false"), [(5, 1), (7, 2), (12, 3)])
def test_krum_chooses_the_same_update(num: int, num_false: int) -> None:
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
