"""Statistics of each column of a few rows: what robust rules make of the values of an element.

Each takes rows of one length and returns float64; the order of the rows does not matter. Rows are
overwritten.
"""

from collections.abc import Callable

import numpy as np

from stratagem.coordinator.updates.numpy_floats import Raw, Wide
from stratagem.coordinator.updates.robust.sorting_network import network, sort_columns

Statistic = Callable[[list[Raw]], Wide]


def median(rows: list[Raw]) -> Wide:
    """Return the middle value, and of an even number the mean of the two in the middle."""
    low, high = (len(rows) - 1) // 2, len(rows) // 2
    sort_columns(rows, network(len(rows), frozenset({low, high})))
    return _middle(rows)


def lower_median(rows: list[Raw]) -> Raw:
    """Return the middle value, and of an even number the smaller of the two, in the rows' type."""
    low = (len(rows) - 1) // 2
    sort_columns(rows, network(len(rows), frozenset({low})))
    return rows[low]


def trimmed_mean(num_trimmed: int) -> Statistic:
    """Return the mean of what is left of the values when so many are left out at each end, added
    from the smallest on."""

    def statistic(rows: list[Raw]) -> Wide:
        end = len(rows) - num_trimmed
        sort_columns(rows, network(len(rows), frozenset(range(num_trimmed, end))))
        return _sum(rows[num_trimmed:end]) / (end - num_trimmed)

    return statistic


def mean_around_median(num_left_out: int) -> Statistic:
    """Return the mean of the values that are nearest to the median, without so many others; of two
    that are equally near the larger one is left out first."""

    def statistic(rows: list[Raw]) -> Wide:
        num_kept = len(rows) - num_left_out
        sort_columns(rows, network(len(rows), frozenset(range(len(rows)))))
        rows = [row.astype(np.float64, copy=False) for row in rows]
        middle = _middle(rows)
        total = _sum(rows[:num_kept])
        # The nearest ones are neighbours in order: they begin one further as long as the next value
        # is nearer than the first.
        for start in range(num_left_out):
            is_nearer = middle - rows[start] > rows[start + num_kept] - middle
            later = _sum(rows[start + 1 : start + 1 + num_kept])
            np.copyto(total, later, where=is_nearer)
        return total / num_kept

    return statistic


def _middle(rows: list[Raw]) -> Wide:
    low, high = rows[(len(rows) - 1) // 2], rows[len(rows) // 2]
    middle: Wide = low.astype(np.float64)
    if high is not low:
        middle *= 0.5  # before they are added: the sum of two may be out of range
        middle += 0.5 * high.astype(np.float64)
    return middle


def _sum(rows: list[Raw]) -> Wide:
    total: Wide = rows[0].astype(np.float64)
    for row in rows[1:]:
        total += row
    return total
