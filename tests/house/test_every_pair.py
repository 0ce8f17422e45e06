"""The cases that tests take instead of a whole product."""

from itertools import combinations, product

import pytest

from tests.every_pair import every_pair, every_value

pytestmark = pytest.mark.core


@pytest.mark.parametrize("sizes", [(2, 2), (4, 3, 2, 2), (3, 1, 5), (4, 2, 2), (1, 1)], ids=str)
def test_any_two_values_of_two_factors_meet_in_few_rows(sizes: tuple[int, ...]) -> None:
    factors = [
        [f"{name}{i}" for i in range(size)] for name, size in zip("abcd", sizes, strict=False)
    ]
    rows = every_pair(*factors)
    for i, j in combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(factors[i], factors[j]))
    two_largest = sorted(sizes)[-2:]
    assert len(rows) <= two_largest[0] * two_largest[1] + 2
    assert rows == every_pair(*factors)


def test_each_value_of_each_factor_occurs() -> None:
    assert every_value("abc", [1, 2]) == [("a", 1), ("b", 2), ("c", 1)]
