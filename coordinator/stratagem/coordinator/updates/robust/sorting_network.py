"""Sorts many columns at once, by minima and maxima of whole rows.

Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2, Algorithm M): which rows
are compared depends on their number alone. Each comparison is two numpy calls on rows that stay in
the cache, 10 times as fast for 10 rows of 10 million float32 as numpy.sort. Comparisons that no
wanted row depends on are left out. Zeros must all have one sign, as min and max may return either.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from stratagem.coordinator.updates.numpy_floats import Raw

COLUMNS: Final = 8192
"""Columns that are sorted together: a row of them fits the first-level cache."""


class Comparator(NamedTuple):
    """Puts the smaller elements of two rows into the first one and the larger into the second."""

    first: int
    second: int
    is_min_wanted: bool
    is_max_wanted: bool


@lru_cache(64)
def network(num_rows: int, wanted: frozenset[int]) -> tuple[Comparator, ...]:
    """Return the comparators after which the wanted rows, counted from the smallest, are right."""
    kept, needed = [], set(wanted)
    for first, second in reversed(list(_merge_exchange(num_rows))):
        if first in needed or second in needed:
            kept.append(Comparator(first, second, first in needed, second in needed))
            needed |= {first, second}
    return tuple(reversed(kept))


def sort_columns(rows: list[Raw], comparators: Sequence[Comparator]) -> None:
    """Sort the columns of rows of equal length and type; the rows are overwritten, and replaced in
    the list."""
    if not comparators:
        return
    spare = np.empty_like(rows[0])
    for first, second, is_min_wanted, is_max_wanted in comparators:
        low, high = rows[first], rows[second]
        if not is_max_wanted:
            np.minimum(low, high, out=low)
        elif not is_min_wanted:
            np.maximum(low, high, out=high)
        else:
            np.minimum(low, high, out=spare)
            np.maximum(low, high, out=high)
            rows[first], spare = spare, low


def _merge_exchange(num_rows: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(0, (num_rows - 1).bit_length() - 1)
    p = top if num_rows > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            for i in range(num_rows - d):
                if i & p == r:
                    yield i, i + d
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
