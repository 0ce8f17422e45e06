"""The verdict of a robust rule on the updates of a round: what each counts, and why.

It is made once and kept, so that a fold that is done again, by whatever machine, combines the same
updates.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from stratagem.common.strategy import (
    Bulyan,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormBound,
    RobustRule,
)
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.updates.robust import geometric_median, krum
from stratagem.coordinator.updates.robust.changes import (
    Matrix,
    gram,
    squared_distances,
    squared_lengths,
)
from stratagem.coordinator.updates.state_reader import StateReader
from stratagem.coordinator.updates.update_sources import Source

_LARGEST: Final = float(np.finfo(np.float64).max)


class Verdict(NamedTuple):
    """For each update, in client order."""

    weights: tuple[float, ...]
    """What it counts: 0 where it is left out; of a norm bound the share that is left of it."""
    scores: tuple[float, ...]
    """What that follows from: a score of Krum, a distance, or a length."""


def judge(
    rule: RobustRule,
    sources: Sequence[Source],
    manifest: Manifest,
    base: StateReader,
    should_stop: Callable[[], None],
) -> Verdict:
    """Return the verdict on updates that began from `base`; each is read once."""
    if isinstance(rule, NormBound):
        lengths = np.sqrt(squared_lengths(sources, manifest, base, should_stop))
        return _verdict([_share(rule.norm, float(length)) for length in lengths], lengths.tolist())
    return verdict_on(rule, gram(sources, manifest, base, should_stop))


def verdict_on(rule: RobustRule, products: Matrix) -> Verdict:
    """Return the verdict that follows from the inner products of the updates' changes."""
    distances = squared_distances(products)
    match rule:
        case Krum(byzantine=num_false):
            chosen = krum.nearest(distances, num_false, 1)
        case MultiKrum(byzantine=num_false, keep=keep):
            chosen = krum.nearest(distances, num_false, keep or len(distances) - num_false)
        case Bulyan(byzantine=num_false):
            chosen = krum.nearest_one_by_one(distances, num_false)
        case GeometricMedian(iterations=iterations):
            weights, lengths = geometric_median.geometric_weights(products, iterations)
            return _verdict(weights.tolist(), lengths.tolist())
        case _:
            raise TypeError(f"{type(rule).__name__} compares no updates")
    chosen_ones = [1.0 if place in chosen else 0.0 for place in range(len(distances))]
    return _verdict(chosen_ones, krum.krum_scores(distances, num_false).tolist())


def _share(bound: float, length: float) -> float:
    return 1.0 if length <= bound else bound / length


def _verdict(weights: Sequence[float], scores: Sequence[float]) -> Verdict:
    return Verdict(tuple(weights), tuple(min(score, _LARGEST) for score in scores))
