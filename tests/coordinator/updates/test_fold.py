"""The fold against the sum written down in plain numpy."""

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import DivergedError, IntegrityError, InvalidInputError
from stratagem.common.numerics.rules import CURRENT, FIRST
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.updates import fold
from stratagem.coordinator.updates.fold import FoldStoppedError, fold_weighted_mean, mean_factors
from tests.coordinator.updates.fold_round import MANIFEST, Round
from tests.coordinator.updates.updates import (
    MIXED,
    Layout,
    accept,
    arrays,
    flip_bit,
    manifest_of,
    plain_mean,
)
from tests.programs import run


def mean_of(manifest: Manifest, weights: list[int]) -> bytes:
    """The mean of clients 0, 1, …"""
    return plain_mean(manifest, [arrays(manifest, n) for n in range(len(weights))], weights)


@pytest.mark.parametrize(
    "weights", [[1], [49], [3, 1], [3, 1, 4, 1], [10, 20, 7, 20, 0, 1, 2]], ids=len
)
def test_the_mean_is_that_of_plain_numpy_in_any_order_of_arrival(
    tmp_path: Path, weights: list[int]
) -> None:
    num = len(weights)
    orders = ([*range(num)], [*reversed(range(num))], [*range(1, num, 2), *range(0, num, 2)])
    for place, order in enumerate(orders):
        data = Round(tmp_path / str(place)).fold(weights, order)
        assert data == mean_of(MANIFEST, weights)


@settings(max_examples=12, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from([spec[1] for spec in MIXED]), st.integers(0, 40)), max_size=6
    ),
    weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=4),
    window=st.integers(1, 50),
)
def test_windows_of_any_size_give_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[str, int]],
    weights: list[int],
    window: int,
) -> None:
    layout: Layout = [(f"t{i}", dtype, (num,)) for i, (dtype, num) in enumerate(shapes)]
    manifest = manifest_of(layout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold, "WINDOW_ELEMENTS", window)
        data = Round(tmp_path_factory.mktemp("fold"), manifest).fold(weights)
    assert data == mean_of(manifest, weights)


def test_runs_under_the_first_rules_round_a_float64_of_one_client_twice() -> None:
    assert mean_factors([7], FIRST) == ([7.0], 7.0)
    assert mean_factors([7], CURRENT) == ([1.0], 1.0)
    for numerics in (FIRST, CURRENT):
        assert mean_factors([3, 1], numerics) == ([3.0, 1.0], 4.0)


def test_integers_that_differ_come_from_the_most_samples_and_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)
    layout = [("same", "int64", (2,)), ("steps", "int64", ()), ("mask", "bool", (9,))]
    a_round = Round(tmp_path, manifest_of(layout))
    for client, steps in enumerate([7, 9, 8]):
        data = np.array([5, 6, steps], "<i8").tobytes() + bytes([client % 2] * 9)
        accept(a_round.spool, client, a_round.manifest, data)
    found = a_round.folded(a_round.entries(), [2, 5, 5])
    assert found == np.array([5, 6, 9], "<i8").tobytes() + bytes([1] * 9)
    shown = caplog.text + capsys.readouterr().out
    assert all(name in shown for name in ("integer tensors differ", "steps", "mask"))
    assert "same" not in shown


def test_tied_parameters_are_folded_once_and_stay_tied(tmp_path: Path) -> None:
    layout = [("a", "float32", (5,)), ("b", "float32", (5,)), ("c", "float64", (2,))]
    manifest = manifest_of(layout, aliases={"b": "a"})
    data = Round(tmp_path, manifest).fold([1, 3])
    assert len(data) == 5 * 4 + 2 * 8
    assert data == mean_of(manifest, [1, 3])


def test_bits_that_the_disk_has_lost_since_are_found(tmp_path: Path) -> None:
    a_round = Round(tmp_path)
    entries = a_round.accepted(2)
    flip_bit(entries[1].path, entries[1].data_start + 20)
    with pytest.raises(IntegrityError, match="damaged: its checksum"):
        a_round.folded(entries, [1, 1])
    entries[1].path.write_bytes(entries[1].path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match="damaged: it ends too early"):
        a_round.folded(entries, [1, 1])
    assert a_round.leftovers() == []


def test_a_fold_stops_when_asked_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "WINDOW_ELEMENTS", 4)
    a_round = Round(tmp_path)
    answers = iter([False, False, False, True])
    with pytest.raises(FoldStoppedError):
        a_round.folded(a_round.accepted(1), [1], should_stop=lambda: next(answers))
    assert a_round.leftovers() == []


def test_a_sum_beyond_float64_is_refused(tmp_path: Path) -> None:
    a_round = Round(tmp_path, manifest_of([("w", "float64", (1,))]))
    for client in range(2):
        accept(a_round.spool, client, a_round.manifest, np.array([1e308], "<f8").tobytes())
    with pytest.raises(DivergedError, match="range of float64"):
        a_round.folded(a_round.entries(), [100, 1])


def test_weights_that_are_none_are_refused(tmp_path: Path) -> None:
    a_round = Round(tmp_path)
    entries = a_round.accepted(1)
    for weights in ([], [0], [-1], [1, 1]):
        with pytest.raises(InvalidInputError, match="weights"):
            a_round.folded(entries, weights)
    with pytest.raises(InvalidInputError, match="laid out"):
        fold_weighted_mean(entries, [1], manifest_of([("w", "float64", (1,))]), a_round.writer())


CRASH = """
from tests.coordinator.updates.fold_round import Round
Round(Path(sys.argv[1])).fold([3, 1])
"""


def test_after_a_crash_the_fold_done_again_gives_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "coordinator.fold.after_window").touch()
    assert run(CRASH, tmp_path, failpoints=tmp_path)[0] == 137
    again = Round(tmp_path)
    assert len(again.entries()) == 2
    assert again.folded(again.entries(), [3, 1]) == mean_of(MANIFEST, [3, 1])
    assert len(again.leftovers()) == 1
