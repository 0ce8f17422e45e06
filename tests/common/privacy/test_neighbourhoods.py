"""Who shares secrets with whom is symmetric, the same for all, and enough of them can open."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.privacy.sharing import (
    AUTO,
    is_complete,
    neighbours,
    never_opened,
    num_neighbours,
    shares_needed,
)

SEED = b"\5" * 32


@pytest.mark.parametrize(
    ("clients", "degree", "number"),
    [
        (3, AUTO, 2),
        (64, AUTO, 63),
        (65, AUTO, 64),
        (101, AUTO, 100),
        (1000, AUTO, 100),
        (10, 4, 4),
        (10, 5, 6),
        (10, 9, 9),
        (10, 50, 9),
        (10, 8, 8),
    ],
)
def test_a_degree_is_even_and_at_most_all_others(
    clients: int, degree: int | str, number: int
) -> None:
    assert num_neighbours(clients, degree) == number
    assert is_complete(clients, degree) is (number == clients - 1)


@given(st.sets(st.integers(0, 10_000), min_size=3, max_size=40), st.integers(2, 12))
def test_neighbours_are_each_others(members: set[int], degree: int) -> None:
    found = neighbours(members, degree, SEED)
    assert found.keys() == members
    for client, others in found.items():
        assert len(set(others)) == len(others) == num_neighbours(len(members), degree)
        assert client not in others
        assert list(others) == sorted(others)
        assert all(client in found[other] for other in others)


def test_the_ring_follows_from_its_seed_and_a_client_with_too_few_holders_is_never_opened() -> None:
    members = range(30)
    assert neighbours(members, 4, SEED) == neighbours(members, 4, SEED)
    assert neighbours(members, 4, SEED) != neighbours(members, 4, b"\6" * 32)
    everybody = neighbours(range(4), AUTO, SEED)
    assert never_opened(everybody, range(4), {0, 1, 2}, 0.67) == []
    assert never_opened(everybody, range(4), {0, 1}, 0.67) == [0, 1, 2, 3]
    ring = {0: (1, 3), 1: (0, 2), 2: (1, 3), 3: (0, 2)}
    assert never_opened(ring, [0, 1, 2], {0, 1, 2}, 0.5) == []
    assert never_opened(ring, [0, 1, 2, 3], {1, 2, 3}, 0.67) == [0, 1, 3]


@pytest.mark.parametrize(
    ("threshold", "holders", "needed"),
    [(0.67, 3, 3), (0.67, 4, 3), (0.67, 10, 7), (0.67, 100, 68), (0.5, 4, 3), (0.999, 5, 5)],
)
def test_more_than_the_threshold_are_needed(threshold: float, holders: int, needed: int) -> None:
    assert shares_needed(threshold, holders) == needed
