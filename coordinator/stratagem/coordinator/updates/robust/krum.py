"""Chooses updates by their distance to those around them (Krum, arXiv:1703.02757).

Among n updates of which f may be false, the score of one is the sum of its squared distances to the
n - f - 2 nearest others; the lowest is the best, and of equal ones the first.
"""

import numpy as np

from stratagem.coordinator.updates.numpy_floats import Wide
from stratagem.coordinator.updates.robust.changes import Matrix


def krum_scores(distances: Matrix, num_false: int) -> Wide:
    """Return the score of each update, of their squared distances."""
    num_updates = len(distances)
    num_nearest = max(1, num_updates - num_false - 2)
    others = np.sort(distances, axis=1)[:, 1:]  # the first one is that to itself
    total = np.zeros(num_updates)
    for column in others[:, :num_nearest].T:
        total += column
    return total


def nearest(distances: Matrix, num_false: int, num_kept: int) -> list[int]:
    """Return the places of the updates with the lowest scores, ascending."""
    in_order = np.argsort(krum_scores(distances, num_false), kind="stable")
    return sorted(int(place) for place in in_order[:num_kept])


def nearest_one_by_one(distances: Matrix, num_false: int) -> list[int]:
    """Return the places of the updates that Bulyan (arXiv:1802.07927) chooses, ascending: the best
    one, then the best of the others among themselves, until n - 2f are chosen."""
    left = list(range(len(distances)))
    chosen = []
    for _ in range(len(distances) - 2 * num_false):
        among_them = distances[np.ix_(left, left)]
        chosen.append(left.pop(int(np.argmin(krum_scores(among_them, num_false)))))
    return sorted(chosen)
