"""The fold against the sum written down in plain numpy."""

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import DivergedError, IntegrityError, InvalidInputError
from stratagem.common.numerics.numerics_rules import CURRENT, FIRST
from stratagem.common.tensors.dtypes import dtype_named
from stratagem.common.tensors.manifest import Manifest
from stratagem.common.tensors.safetensors_file import blob_digest
from stratagem.coordinator.updates.folding import fold
from stratagem.coordinator.updates.folding.fold import (
    FoldStoppedError,
    fold_weighted_mean,
    mean_factors,
)
from stratagem.coordinator.updates.numpy_floats import narrow, storage, widen
from tests.coordinator.updates.fold_round import FOLDER, MANIFEST, Round
from tests.coordinator.updates.updates import (
    MIXED,
    Layout,
    accept,
    arrays,
    data_of,
    flip_bit,
    manifest_of,
)
from tests.programs import run


def reference(manifest: Manifest, seeds: list[int], weights: list[int]) -> bytes:
    """The whole tensors, one after the other."""
    clients = [arrays(manifest, seed) for seed in seeds]
    out = []
    for spec in manifest.stored():
        raws = [client[spec.name] for client in clients]
        if not dtype_named(spec.dtype).is_floating:
            out.append(raws[int(np.argmax(weights))])
            continue
        terms = []
        for raw, weight in zip(raws, weights, strict=True):
            values = np.empty(raw.shape)
            widen(spec.dtype, raw, values)
            terms.append(weight * values)
        total = terms[0]
        if len(raws) == 1:
            out.append(raws[0])
            continue
        for term in terms[1:]:
            total = total + term
        result = np.empty(total.shape, storage(spec.dtype))
        narrow(spec.dtype, total / sum(weights), result)
        out.append(result)
    return b"".join(raw.tobytes() for raw in out)


@pytest.mark.parametrize("weights", [[1], [3, 1], [10, 20, 7, 20, 0]])
def test_the_mean_is_that_of_plain_numpy_bit_for_bit(tmp_path: Path, weights: list[int]) -> None:
    data = Round(tmp_path).fold(weights)
    assert data == reference(MANIFEST, list(range(len(weights))), weights)


def test_the_order_of_arrival_does_not_matter(tmp_path: Path) -> None:
    weights = [3, 1, 4, 1]
    results = {
        Round(tmp_path / str(index)).fold(weights, order)
        for index, order in enumerate(([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]))
    }
    assert results == {reference(MANIFEST, [0, 1, 2, 3], weights)}


@settings(max_examples=25, deadline=None)
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
    assert data == reference(manifest, list(range(len(weights))), weights)


@pytest.mark.parametrize("weight", [1, 3, 7, 49, 1001])
def test_one_client_alone_gets_its_own_bits_back(tmp_path: Path, weight: int) -> None:
    assert Round(tmp_path).fold([weight]) == data_of(MANIFEST, 0)


def test_runs_under_the_first_rules_round_a_float64_of_one_client_twice() -> None:
    assert mean_factors([7], FIRST) == ([7.0], 7.0)
    assert mean_factors([7], CURRENT) == ([1.0], 1.0)
    for numerics in (FIRST, CURRENT):
        assert mean_factors([3, 1], numerics) == ([3.0, 1.0], 4.0)


def test_integers_that_differ_come_from_the_most_samples_and_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING)
    manifest = manifest_of(
        [("same", "int64", (2,)), ("steps", "int64", ()), ("mask", "bool", (9,))]
    )
    a_round = Round(tmp_path, manifest)
    entries = []
    for client, steps in enumerate([7, 9, 8]):
        data = np.array([5, 6, steps], "<i8").tobytes() + bytes([client % 2] * 9)
        entries.append(accept(a_round.spool, client, manifest, data))
    digest, *_ = fold_weighted_mean(entries, [2, 5, 5], manifest, a_round.writer())
    data = a_round.store.path(digest).read_bytes()[-33:]
    assert np.frombuffer(data[:24], "<i8").tolist() == [5, 6, 9]
    assert list(data[24:]) == [1] * 9
    shown = caplog.text + capsys.readouterr().out
    assert "integer tensors differ" in shown
    assert "steps" in shown
    assert "mask" in shown
    assert "same" not in shown


def test_tied_parameters_are_folded_once_and_stay_tied(tmp_path: Path) -> None:
    layout = [("a", "float32", (5,)), ("b", "float32", (5,)), ("c", "float64", (2,))]
    manifest = manifest_of(layout, aliases={"b": "a"})
    data = Round(tmp_path, manifest).fold([1, 3])
    assert len(data) == 5 * 4 + 2 * 8
    assert data == reference(manifest, [0, 1], [1, 3])


def test_bits_that_the_disk_has_lost_since_are_found(tmp_path: Path) -> None:
    a_round = Round(tmp_path)
    entries = [accept(a_round.spool, c, MANIFEST, data_of(MANIFEST, c)) for c in (0, 1)]
    flip_bit(entries[1].path, entries[1].data_start + 20)
    with pytest.raises(IntegrityError, match="damaged: its checksum"):
        fold_weighted_mean(entries, [1, 1], MANIFEST, a_round.writer())
    entries[1].path.write_bytes(entries[1].path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match="damaged: it ends too early"):
        fold_weighted_mean(entries, [1, 1], MANIFEST, a_round.writer())
    assert a_round.leftovers() == []


def test_a_fold_stops_when_asked_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "WINDOW_ELEMENTS", 4)
    a_round = Round(tmp_path)
    entry = accept(a_round.spool, 0, MANIFEST, data_of(MANIFEST, 0))
    answers = iter([False, False, False, True])
    with pytest.raises(FoldStoppedError):
        fold_weighted_mean(
            [entry], [1], MANIFEST, a_round.writer(), should_stop=lambda: next(answers)
        )
    assert a_round.leftovers() == []


def test_a_sum_beyond_float64_is_refused(tmp_path: Path) -> None:
    manifest = manifest_of([("w", "float64", (1,))])
    a_round = Round(tmp_path, manifest)
    large = np.array([1e308], "<f8").tobytes()
    entries = [accept(a_round.spool, client, manifest, large) for client in range(2)]
    with pytest.raises(DivergedError, match="range of float64"):
        fold_weighted_mean(entries, [100, 1], manifest, a_round.writer())


@pytest.mark.parametrize("weights", [[], [0], [-1], [1, 1]])
def test_weights_that_are_none_are_refused(tmp_path: Path, weights: list[int]) -> None:
    a_round = Round(tmp_path)
    entry = accept(a_round.spool, 0, MANIFEST, data_of(MANIFEST, 0))
    with pytest.raises(InvalidInputError, match="weights"):
        fold_weighted_mean([entry], weights, MANIFEST, a_round.writer())
    other = manifest_of([("w", "float64", (1,))])
    with pytest.raises(InvalidInputError, match="laid out"):
        fold_weighted_mean([entry], [1], other, a_round.writer())


CRASH = """
from tests.coordinator.updates.fold_round import Round
Round(Path(sys.argv[1])).fold([3, 1])
"""


@pytest.mark.parametrize(
    "failpoint",
    [
        "coordinator.fold.after_window",
        "coordinator.blobs.before_rename",
        "coordinator.blobs.after_rename",
    ],
)
def test_after_a_crash_the_fold_done_again_gives_the_same_bits(
    tmp_path: Path, failpoint: str
) -> None:
    (tmp_path / failpoint).touch()
    assert run(CRASH, tmp_path, failpoints=tmp_path)[0] == 137
    again = Round(tmp_path)
    entries = list(again.spool.entries(*FOLDER).values())
    assert len(entries) == 2
    digest, *_ = fold_weighted_mean(entries, [3, 1], MANIFEST, again.writer())
    expected = reference(MANIFEST, [0, 1], [3, 1])
    assert digest == blob_digest(MANIFEST, [expected])
    assert [path.stem for path in again.leftovers()] == [digest]
