"""Cases from several factors, without their whole product."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def every_pair(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows in which any two values of two factors meet: what breaks code is rarely three at once.

    Greedy over the whole product, and the same rows at each call.
    """
    sides = list(combinations(range(len(factors)), 2))

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, j, row[i], row[j]) for i, j in sides}

    rows = list(product(*(range(len(factor)) for factor in factors)))
    left = set().union(*map(pairs, rows))
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(pairs(row) & left))
        left -= pairs(best)
        chosen.append(tuple(factor[i] for factor, i in zip(factors, best, strict=True)))
    return chosen


def every_value(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows in which each value of each factor occurs: as many as the longest factor has values."""
    most = max(map(len, factors))
    return [tuple(factor[i % len(factor)] for factor in factors) for i in range(most)]
