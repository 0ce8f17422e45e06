"""Folds in which updates count otherwise than by rows, against plain numpy."""

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import DivergedError
from stratagem.common.tensors.dtypes import dtype_named
from stratagem.common.tensors.manifest import Manifest, TensorSpec
from stratagem.common.tensors.safetensors_file import header_bytes, read_header
from stratagem.coordinator.updates.folding import fold
from stratagem.coordinator.updates.folding.fold import fold_weighted_mean, mean_factors
from stratagem.coordinator.updates.numpy_floats import Raw, storage, widen
from stratagem.coordinator.updates.robust import changes
from stratagem.coordinator.updates.state_reader import open_state
from stratagem.coordinator.updates.update_sources import WholeSource
from stratagem.coordinator.updates.weighing.fair_shares import Fairness, fair_shares
from stratagem.coordinator.updates.weighing.normalized_steps import length_of_steps, nova_factors
from stratagem.coordinator.updates.weighing.scaled_changes import ScaledChanges, Shares
from tests.coordinator.updates.fold_round import FOLDER, Round
from tests.coordinator.updates.updates import Layout, accept, arrays, data_of, key, manifest_of
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
    """A round whose base has the seed 1000."""

    def __init__(self, root: Path, manifest: Manifest = MANIFEST, base: bytes = b"") -> None:
        super().__init__(root, manifest)
        writer = self.writer()
        writer.write(header_bytes(manifest))
        writer.write(base or data_of(manifest, 1000))
        self.base = writer.commit()

    def fair(self, q: float, losses: list[float], order: list[int] | None = None) -> bytes:
        """The next state under q-FedAvg."""
        entries = {
            client: accept(self.spool, client, self.manifest, data_of(self.manifest, client))
            for client in order or range(len(losses))
        }
        in_order = [entries[client] for client in sorted(entries)]
        with ExitStack() as files:
            manifest, state = open_state(files, self.store, self.base)
            sources = [WholeSource(entry) for entry in in_order]
            verdict = Fairness(q, LR, losses).verdict(sources, manifest, state, lambda: None)
            return self.moved(list(verdict.weights), list(verdict.weights))

    def moved(self, factors: list[float], means: list[float], largest: int = 0) -> bytes:
        """The state moved by multiples of the changes of those that were accepted."""
        entries = [entry for _, entry in sorted(self.spool.entries(*FOLDER).items())]
        with ExitStack() as files:
            manifest, state = open_state(files, self.store, self.base)
            shares = Shares(factors, *mean_factors(means, 2), largest)
            combination = ScaledChanges(shares, manifest, state)
            folded = fold_weighted_mean(
                *(entries, factors, self.manifest, self.writer()),
                combination=combination,
                base=state,
            )
        _, start = read_header(self.store.path(folded.state))
        return self.store.path(folded.state).read_bytes()[start:]


def tensors(data: bytes, manifest: Manifest = MANIFEST) -> dict[str, np.ndarray]:
    """Values by name, in float64 where they are floats."""
    found = {}
    for spec in manifest.stored():
        raw = np.frombuffer(data[spec.offset :][: spec.size_bytes], storage(spec.dtype))
        found[spec.name] = raw
        if dtype_named(spec.dtype).is_floating:
            found[spec.name] = np.empty(raw.shape)
            widen(spec.dtype, raw, found[spec.name])
    return found


def whole(found: dict[str, np.ndarray]) -> np.ndarray:
    """All trained parameters as one vector."""
    kinds = {spec.name: spec for spec in MANIFEST.stored()}
    names = [n for n in found if dtype_named(kinds[n].dtype).is_floating and n != "model/mean"]
    return np.concatenate([found[name] for name in names])


@pytest.mark.parametrize("q", [0.0, 0.2, 1.0, 5.0])
@pytest.mark.parametrize("num", [1, 2, 7])
def test_fair_shares_make_what_the_paper_says(tmp_path: Path, q: float, num: int) -> None:
    losses = [0.3 * (client + 1) for client in range(num)]
    found = tensors(WeighedRound(tmp_path).fair(q, losses))
    base = whole(tensors(data_of(MANIFEST, 1000)))
    rows = np.stack([whole(tensors(data_of(MANIFEST, client))) for client in range(num)])
    expected = q_fedavg(base, rows, losses, q, LR)
    np.testing.assert_allclose(whole(found)[:14], expected[:14], rtol=1e-12)
    np.testing.assert_allclose(whole(found), expected, rtol=1e-2, atol=1e-2)  # bfloat16
    means = np.stack([tensors(data_of(MANIFEST, c))["model/mean"] for c in range(num)])
    powers = np.array([(loss + 1e-10) ** q for loss in losses])
    averaged = powers @ means / powers.sum()
    np.testing.assert_allclose(found["model/mean"], averaged, rtol=1e-12, atol=1e-15)


def test_only_trained_parameters_have_a_length(tmp_path: Path) -> None:
    """A running mean that is far from the base's says nothing of a gradient."""
    a_round = WeighedRound(tmp_path)
    entry = accept(a_round.spool, 0, MANIFEST, data_of(MANIFEST, 0))
    with ExitStack() as files:
        manifest, state = open_state(files, a_round.store, a_round.base)
        fairness = Fairness(0.5, LR, [1.0])
        sources = [WholeSource(entry)]
        (length,) = fairness.verdict(sources, manifest, state, lambda: None).scores
    own, base = (whole(tensors(data_of(MANIFEST, seed))) for seed in (0, 1000))
    assert length == pytest.approx(np.linalg.norm(own - base), rel=1e-12)


def test_the_order_of_arrival_and_the_windows_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [0.1, 2.0, 0.7]
    expected = WeighedRound(tmp_path / "a").fair(0.5, losses)
    assert WeighedRound(tmp_path / "b").fair(0.5, losses, [2, 0, 1]) == expected
    monkeypatch.setattr(fold, "WINDOW_ELEMENTS", 3)
    assert WeighedRound(tmp_path / "c").fair(0.5, losses) == expected
    monkeypatch.setattr(changes, "_BLOCK", 2)
    in_blocks = WeighedRound(tmp_path / "d").fair(0.5, losses)
    np.testing.assert_allclose(
        whole(tensors(in_blocks))[:14], whole(tensors(expected))[:14], rtol=1e-12
    )


def test_integers_are_those_of_the_named_update(tmp_path: Path) -> None:
    a_round = WeighedRound(tmp_path)
    for client in range(6):
        accept(a_round.spool, client, MANIFEST, data_of(MANIFEST, client))
    for largest in range(6):
        found = tensors(a_round.moved([0.1] * 6, [1.0] * 6, largest))
        for name in ("model/count", "model/flag"):
            assert np.array_equal(found[name], arrays(MANIFEST, largest)[name])


def test_factors_of_zero_leave_the_parameters_where_they_are(tmp_path: Path) -> None:
    a_round = WeighedRound(tmp_path)
    for client in range(2):
        accept(a_round.spool, client, MANIFEST, data_of(MANIFEST, client))
    found, base = tensors(a_round.moved([0.0, 0.0], [1.0, 3.0])), tensors(data_of(MANIFEST, 1000))
    assert np.array_equal(whole(found), whole(base))
    first, second = (tensors(data_of(MANIFEST, client))["model/mean"] for client in range(2))
    assert np.array_equal(found["model/mean"], (first + 3 * second) / 4)


def test_what_is_infinite_stays_so_and_what_becomes_so_is_refused(tmp_path: Path) -> None:
    manifest = manifest_of([("model/w", "float16", (3,)), ("model/n", "int64", ())])
    base, own = np.array([-np.inf, 1.0, 2.0], "<f2"), np.array([-np.inf, 5.0, 2.0], "<f2")
    number = np.zeros(1, "<i8").tobytes()
    a_round = WeighedRound(tmp_path, manifest, base.tobytes() + number)
    whole_base = np.frombuffer(base.tobytes() + number, np.uint8)

    def before(spec: TensorSpec, offset: int, num_bytes: int) -> Raw:
        return whole_base[spec.offset + offset :][:num_bytes]

    with closing(a_round.spool.open(key(0), manifest, before=before)) as writer:
        writer.write(own.tobytes() + number)
        writer.commit(manifest, 1)
    moved = np.frombuffer(a_round.moved([2.0], [1.0])[:6], "<f2")
    assert moved.tolist() == [-np.inf, 9.0, 2.0]
    with pytest.raises(DivergedError, match="beyond the range of float16"):
        a_round.moved([1e5], [1.0])


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


def test_losses_of_zero_share_evenly() -> None:
    assert fair_shares([0.0, 0.0], [0.0, 0.0], 200.0, 0.1) == [0.5, 0.5]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize(("momentum", "pull"), [(0.0, 0.0), (0.5, 0.0), (0.9, 0.0), (0.0, 0.3)])
def test_steps_go_as_far_as_a_constant_gradient_takes_them(
    num_steps: int, momentum: float, pull: float
) -> None:
    found = length_of_steps(num_steps, momentum, pull)
    assert found == pytest.approx(constant_steps(num_steps, momentum, pull), rel=1e-11)


@pytest.mark.parametrize("num", [1, 2, 7])
def test_normalized_changes_make_what_the_paper_says(tmp_path: Path, num: int) -> None:
    a_round = WeighedRound(tmp_path)
    for client in range(num):
        accept(a_round.spool, client, MANIFEST, data_of(MANIFEST, client))
    num_rows = [float(3 * client + 1) for client in range(num)]
    lengths = [length_of_steps(2 * client + 1, 0.9) for client in range(num)]
    found = tensors(a_round.moved(nova_factors(num_rows, lengths), num_rows))
    base = whole(tensors(data_of(MANIFEST, 1000)))
    rows = np.stack([whole(tensors(data_of(MANIFEST, client))) for client in range(num)])
    expected = fednova(base, rows, num_rows, lengths)
    np.testing.assert_allclose(whole(found)[:14], expected[:14], rtol=1e-12, atol=1e-14)
    means = np.stack([tensors(data_of(MANIFEST, c))["model/mean"] for c in range(num)])
    averaged = np.array(num_rows) @ means / sum(num_rows)
    np.testing.assert_allclose(found["model/mean"], averaged, rtol=1e-12, atol=1e-15)


def test_clients_that_go_equally_far_count_by_their_rows() -> None:
    np.testing.assert_allclose(nova_factors([3.0, 1.0], [5.0, 5.0]), [0.75, 0.25], rtol=1e-15)


def test_a_client_without_a_step_has_nothing_to_count() -> None:
    assert nova_factors([3.0, 1.0], [0.0, 4.0]) == [0.0, 1.0]
    assert nova_factors([0.0, 2.0], [0.0, 4.0]) == [0.0, 1.0]
    assert nova_factors([0.0, 0.0], [0.0, 0.0]) == [0.0, 0.0]
    assert nova_factors([2.0], [0.0]) == [0.0]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8))
def test_the_mean_goes_as_far_as_the_clients_do_on_average(each: list[tuple[int, int]]) -> None:
    """Where all have gone in one direction, by their steps."""
    rows, steps = [float(num) for num, _ in each], [float(num) for _, num in each]
    factors = nova_factors(rows, steps)
    gone = sum(factor * length for factor, length in zip(factors, steps, strict=True))
    counting = sum(num for num, length in each if length)
    expected = sum(num * length for num, length in each) / counting if counting else 0.0
    assert gone == pytest.approx(expected, rel=1e-9)
