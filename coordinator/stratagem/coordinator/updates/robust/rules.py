"""Makes of a robust rule what takes the place of the weighted mean in a fold."""

from collections.abc import Sequence
from typing import assert_never

from stratagem.common.strategy import (
    Bulyan,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBound,
    RobustRule,
    TrimmedMean,
)
from stratagem.coordinator.updates.robust.combinations import StatisticOfRows, WeightedSum
from stratagem.coordinator.updates.robust.row_statistics import (
    mean_around_median,
    median,
    trimmed_mean,
)
from stratagem.coordinator.updates.state_reader import StateReader


def places_read(rule: RobustRule, num_updates: int, weights: Sequence[float]) -> list[int]:
    """Return the places of the updates that the fold reads: without those that count nothing."""
    if not weights or isinstance(rule, NormBound):
        return list(range(num_updates))
    return [place for place, weight in enumerate(weights) if weight]


def combination(
    rule: RobustRule, weights: Sequence[float], base: StateReader
) -> StatisticOfRows | WeightedSum:
    """Return what combines the updates that are read; weights: theirs, in client order."""
    num = len(weights)
    match rule:
        case Median():
            return StatisticOfRows(num, median)
        case TrimmedMean():
            return StatisticOfRows(num, trimmed_mean(rule.num_trimmed(num)))
        case Bulyan():
            return StatisticOfRows(num, mean_around_median(2 * rule.byzantine))
        case Krum() | MultiKrum() | GeometricMedian():
            return WeightedSum(weights)
        case NormBound():
            return WeightedSum(weights, base)
        case _:
            assert_never(rule)
