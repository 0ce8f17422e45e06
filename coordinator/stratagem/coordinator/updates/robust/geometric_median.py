"""The geometric median as weights of updates (arXiv:1912.13445), by Weiszfeld's iteration.

    d_k <- |x_k - sum a_j x_j|        a_k <- (1 / d_k) / sum (1 / d_j)

Every iterate is a weighted mean, so its distances follow from inner products, and the updates are
read once however many iterations there are. The first weights are 1 / (median distance to the other
updates): from the mean, which one false update can put anywhere, an iteration takes away only a
constant factor of the way.
"""

from typing import Final

import numpy as np

from stratagem.common.base.errors import DivergedError
from stratagem.coordinator.updates.numpy_floats import Wide
from stratagem.coordinator.updates.robust.changes import Matrix, squared_distances

_SHORTEST: Final = 1e-12
"""A distance below it counts as this: an iterate may fall on an update."""


def geometric_weights(products: Matrix, iterations: int) -> tuple[Wide, Wide]:
    """Return the weights after so many iterations, of inner products, and the distances to the last
    iterate. An update that is infinitely far from most others has weight 0."""
    to_others = _median_distances(products)
    is_near = np.isfinite(to_others)
    if not is_near.any():
        raise DivergedError("the distances between most updates are beyond the range of float64")
    mine = _inverse(to_others[is_near])
    among_near = products[np.ix_(is_near, is_near)]
    # Seen from the update in the midst of the others: what they have in common cancels out before
    # it costs digits.
    midst = int(np.argmax(mine))
    row = among_near[midst]
    among_near = among_near - row[:, None] - row[None, :] + row[midst]
    away = _distances_to(among_near, mine)
    for _ in range(iterations):
        mine = _inverse(away)
        away = _distances_to(among_near, mine)
    found, lengths = np.zeros(len(products)), np.full(len(products), np.inf)
    found[is_near], lengths[is_near] = mine, away
    return found, lengths


def _median_distances(products: Matrix) -> Wide:
    in_order = np.sort(squared_distances(products), axis=1)
    middle: Wide = np.sqrt(in_order[:, len(products) // 2])
    return middle


def _inverse(lengths: Wide) -> Wide:
    inverse = 1.0 / np.maximum(lengths, _SHORTEST)
    return np.asarray(inverse / np.add.reduce(inverse))


def _distances_to(products: Matrix, mine: Wide) -> Wide:
    with_mine = np.add.reduce(products * mine, axis=1)
    squared = np.diag(products) - 2 * with_mine + np.add.reduce(with_mine * mine)
    away: Wide = np.sqrt(np.maximum(squared, 0.0))
    return away
