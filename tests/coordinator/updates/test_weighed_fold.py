"""Folds in which updates count otherwise than by rows, against plain numpy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.tensors.manifest import Manifest, dtype_named
from stratagem.coordinator.updates import fold, robust
from stratagem.coordinator.updates.fold import mean_factors
from stratagem.coordinator.updates.reading import WholeSource
from stratagem.coordinator.updates.robust import Verdict
from stratagem.coordinator.updates.weighing import (
    Fairness,
    ScaledChanges,
    Shares,
    fair_shares,
    length_of_steps,
    nova_factors,
)
from tests.coordinator.updates.fold_round import BASE, Round
from tests.coordinator.updates.updates import (
    Layout,
    arrays,
    data_of,
    elements,
    manifest_of,
    wide,
)
from tests.reference.weighing import constant_steps, fednova, q_fedavg

LAYOUT: Layout = (
    ("model/w64", "float64", (5,)),
    ("model/mean", "float64", (4,)),
    ("model/v64", "float64", (3, 3)),
    ("model/count", "int64", ()),
    ("model/w32", "float32", (7, 3)),
    ("model/flag", "bool", (3,)),
    ("model/empty", "float32", (0, 4)),
    ("model/h16", "float16", (9,)),
    ("model/b16", "bfloat16", (11,)),
)
MANIFEST = manifest_of(LAYOUT, metadata={"averaged": '["model/mean"]'})
LR = 0.1


class WeighedRound(Round):
    def __init__(self, root: Path, manifest: Manifest = MANIFEST, base: bytes = b"") -> None:
        super().__init__(root, manifest)
        self.begin(base)

    def fair(self, q: float, losses: list[float], order: Sequence[int] = ()) -> bytes:
        """The next state under q-FedAvg."""
        verdict = self.verdict(q, losses, order)
        return self.moved(list(verdict.weights), list(verdict.weights))

    def verdict(self, q: float, losses: list[float], order: Sequence[int] = ()) -> Verdict:
        sources = [WholeSource(entry) for entry in self.accepted(len(losses), order)]
        with self.opened() as (manifest, state):
            return Fairness(q, LR, losses).verdict(sources, manifest, state, lambda: None)

    def moved(self, factors: list[float], means: list[float], largest: int = 0) -> bytes:
        """The state moved by multiples of the changes of those that were accepted."""
        with self.opened() as (manifest, state):
            shares = Shares(factors, *mean_factors(means, 2), largest)
            rule = ScaledChanges(shares, manifest, state)
            return self.folded(self.entries(), factors, combination=rule, base=state)


def tensors(data: bytes) -> dict[str, np.ndarray]:
    """Values by name, in float64 where they are floats."""
    found = elements(MANIFEST, data)
    return {
        spec.name: wide(spec.dtype, found[spec.name])
        if dtype_named(spec.dtype).is_floating
        else found[spec.name]
        for spec in MANIFEST.stored()
    }


def whole(found: dict[str, np.ndarray]) -> np.ndarray:
    """All trained parameters as one vector."""
    kinds = {spec.name: spec for spec in MANIFEST.stored()}
    names = [n for n in found if dtype_named(kinds[n].dtype).is_floating and n != "model/mean"]
    return np.concatenate([found[name] for name in names])


def check(found: bytes, expected: np.ndarray, counts: list[float]) -> None:
    """The parameters are the expected ones, and the running mean that of the clients."""
    values = whole(tensors(found))
    np.testing.assert_allclose(values[:14], expected[:14], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(values, expected, rtol=1e-2, atol=1e-2)  # bfloat16
    means = np.stack([tensors(data_of(MANIFEST, c))["model/mean"] for c in range(len(counts))])
    averaged = np.array(counts) @ means / sum(counts)
    np.testing.assert_allclose(tensors(found)["model/mean"], averaged, rtol=1e-12, atol=1e-15)


def clients(num: int) -> tuple[np.ndarray, np.ndarray]:
    """The parameters of the base, and those of each client."""
    rows = [whole(tensors(data_of(MANIFEST, client))) for client in range(num)]
    return whole(tensors(data_of(MANIFEST, BASE))), np.stack(rows)


@pytest.mark.parametrize(("num", "q"), [(1, 0.2), (2, 0.0), (2, 1.0), (7, 0.2), (7, 5.0)])
def test_fair_shares_make_what_the_paper_says(tmp_path: Path, num: int, q: float) -> None:
    losses = [0.3 * (client + 1) for client in range(num)]
    found = WeighedRound(tmp_path).fair(q, losses)
    check(found, q_fedavg(*clients(num), losses, q, LR), [(loss + 1e-10) ** q for loss in losses])


def test_only_trained_parameters_have_a_length(tmp_path: Path) -> None:
    """A running mean that is far from the base's says nothing of a gradient."""
    (length,) = WeighedRound(tmp_path).verdict(0.5, [1.0]).scores
    base, (own,) = clients(1)
    assert length == pytest.approx(np.linalg.norm(own - base), rel=1e-12)


def test_the_order_of_arrival_and_the_windows_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [0.1, 2.0, 0.7]
    expected = WeighedRound(tmp_path / "a").fair(0.5, losses)
    assert WeighedRound(tmp_path / "b").fair(0.5, losses, [2, 0, 1]) == expected
    monkeypatch.setattr(fold, "WINDOW_ELEMENTS", 3)
    assert WeighedRound(tmp_path / "c").fair(0.5, losses) == expected
    monkeypatch.setattr(robust, "_BLOCK", 2)
    in_blocks = WeighedRound(tmp_path / "d").fair(0.5, losses)
    np.testing.assert_allclose(
        whole(tensors(in_blocks))[:14], whole(tensors(expected))[:14], rtol=1e-12
    )


def test_integers_are_those_of_the_named_update(tmp_path: Path) -> None:
    a_round = WeighedRound(tmp_path)
    a_round.accepted(6)
    for largest in range(6):
        found = tensors(a_round.moved([0.1] * 6, [1.0] * 6, largest))
        for name in ("model/count", "model/flag"):
            assert np.array_equal(found[name], arrays(MANIFEST, largest)[name])


def test_factors_of_zero_leave_the_parameters_where_they_are(tmp_path: Path) -> None:
    a_round = WeighedRound(tmp_path)
    a_round.accepted(2)
    found, base = tensors(a_round.moved([0.0, 0.0], [1.0, 3.0])), tensors(data_of(MANIFEST, BASE))
    assert np.array_equal(whole(found), whole(base))
    first, second = (tensors(data_of(MANIFEST, client))["model/mean"] for client in range(2))
    assert np.array_equal(found["model/mean"], (first + 3 * second) / 4)


@settings(max_examples=50)
@given(
    st.lists(st.floats(0, 1e300), min_size=1, max_size=8),
    st.floats(0, 1e4),
    st.floats(1e-6, 1e6),
    st.data(),
)
def test_shares_are_at_most_one_in_all_whatever_the_losses(
    losses: list[float], q: float, lr: float, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.floats(0), min_size=len(losses), max_size=len(losses)))
    shares = fair_shares(losses, lengths, q, lr)
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) <= 1 + 1e-12
    if q == 0:
        assert shares == [1 / len(losses)] * len(losses)


def test_a_slope_below_all_numbers_leaves_the_shares_as_they_are() -> None:
    """Even where the length, divided by the rate, is beyond all numbers."""
    assert fair_shares([0.0, 1.9e143], [0.0, 1.79e302], 1e-190, 1e-6) == [0.5, 0.5]
    assert fair_shares([0.0, 0.0], [0.0, 0.0], 200.0, 0.1) == [0.5, 0.5]


@pytest.mark.parametrize(("momentum", "pull"), [(0.0, 0.0), (0.5, 0.0), (0.9, 0.0), (0.0, 0.3)])
def test_steps_go_as_far_as_a_constant_gradient_takes_them(momentum: float, pull: float) -> None:
    for num_steps in (0, 1, 2, 7, 1000):
        found = length_of_steps(num_steps, momentum, pull)
        assert found == pytest.approx(constant_steps(num_steps, momentum, pull), rel=1e-11)


@pytest.mark.parametrize("num", [1, 2, 7])
def test_normalized_changes_make_what_the_paper_says(tmp_path: Path, num: int) -> None:
    a_round = WeighedRound(tmp_path)
    a_round.accepted(num)
    num_rows = [float(3 * client + 1) for client in range(num)]
    lengths = [length_of_steps(2 * client + 1, 0.9) for client in range(num)]
    found = a_round.moved(nova_factors(num_rows, lengths), num_rows)
    check(found, fednova(*clients(num), num_rows, lengths), num_rows)


def test_clients_count_by_their_rows_where_they_have_gone_at_all() -> None:
    np.testing.assert_allclose(nova_factors([3.0, 1.0], [5.0, 5.0]), [0.75, 0.25], rtol=1e-15)
    assert nova_factors([3.0, 1.0], [0.0, 4.0]) == [0.0, 1.0]
    assert nova_factors([0.0, 2.0], [0.0, 4.0]) == [0.0, 1.0]
    assert nova_factors([0.0, 0.0], [0.0, 0.0]) == [0.0, 0.0]
    assert nova_factors([2.0], [0.0]) == [0.0]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8))
def test_the_mean_goes_as_far_as_the_clients_do_on_average(each: list[tuple[int, int]]) -> None:
    """Where all have gone in one direction, by their steps."""
    rows, steps = [float(num) for num, _ in each], [float(num) for _, num in each]
    factors = nova_factors(rows, steps)
    gone = sum(factor * length for factor, length in zip(factors, steps, strict=True))
    counting = sum(num for num, length in each if length)
    expected = sum(num * length for num, length in each) / counting if counting else 0.0
    assert gone == pytest.approx(expected, rel=1e-9)
