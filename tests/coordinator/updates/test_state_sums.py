"""Sums of the states of metrics over clients: those of a loop, and what does not go together."""

from collections.abc import Iterable

import numpy as np
import pytest

from stratagem.coordinator.effects.party_updates import States, SumsSoFar, UnlikeStatesError

F1, MEAN = ("test.a:f", "hits"), ("test.a:f", "total")


def of(client: int, *, shape: tuple[int, ...] = (3,)) -> States:
    draw = np.random.default_rng(client)
    return {F1: draw.integers(0, 99, shape), MEAN: np.asarray(draw.standard_normal() * 1e8)}


def added(states: Iterable[tuple[int, States]]) -> dict[tuple[str, str], np.ndarray]:
    sums = SumsSoFar()
    for client, own in states:
        sums.add(client, own)
    return sums.totals


@pytest.mark.parametrize("num", [1, 7])
def test_states_are_added_in_order_as_wide_numbers(num: int) -> None:
    given = [(client, of(client)) for client in range(num)]
    found = added(given)
    assert found[F1].tolist() == [sum(int(s[F1][i]) for _, s in given) for i in range(3)]
    total = 0.0
    for _, states in given:
        total += float(states[MEAN])
    assert float(found[MEAN]) == total
    assert [str(found[key].dtype) for key in (F1, MEAN)] == ["int64", "float64"]
    assert given[0][1][F1].tolist() == of(0)[F1].tolist()


def test_nobody_adds_up_to_nothing() -> None:
    assert added([]) == {}


def test_infinite_numbers_are_added_as_a_loop_would() -> None:
    found = added([(0, {MEAN: np.asarray(np.inf)}), (1, {MEAN: np.asarray(-np.inf)})])
    assert np.isnan(found[MEAN])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (of(4, shape=(4,)), r"int64 \(4,\) at client 4, and int64 \(3,\) at client 2"),
        ({**of(4), F1: np.zeros(3)}, r"float64 \(3,\) at client 4"),
        ({F1: np.zeros(3, np.int64)}, "client 4 has other states than client 2"),
        ({**of(4), F1: np.full(3, 2**63 - 1)}, "too large with that of client 4"),
        ({**of(4), F1: np.full(3, -(2**63))}, None),
    ],
)
def test_states_that_do_not_go_together_are_refused(other: States, why: str | None) -> None:
    given = [(2, of(2)), (4, other)]
    if why is None:
        assert added(given)[F1].tolist() == [-(2**63) + int(each) for each in of(2)[F1]]
        return
    with pytest.raises(UnlikeStatesError, match=why):
        added(given)
