"""Folds under robust rules against plain numpy, at sizes that divide evenly into nothing."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import DivergedError, IntegrityError
from stratagem.common.strategy import (
    Bulyan,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NormBound,
    RobustRule,
    TrimmedMean,
    is_judged,
)
from stratagem.common.tensors.dtypes import dtype_named
from stratagem.common.tensors.manifest import Manifest
from stratagem.common.tensors.safetensors_file import header_bytes, read_header
from stratagem.coordinator.updates.folding import fold
from stratagem.coordinator.updates.folding.fold import FoldStoppedError, fold_weighted_mean
from stratagem.coordinator.updates.numpy_floats import narrow, storage, widen
from stratagem.coordinator.updates.robust import changes, sorting_network
from stratagem.coordinator.updates.robust.rules import combination, places_read
from stratagem.coordinator.updates.robust.verdict import Verdict, judge
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.state_reader import open_state
from stratagem.coordinator.updates.update_sources import WholeSource
from tests.coordinator.updates.fold_round import MANIFEST, Round
from tests.coordinator.updates.updates import (
    MIXED,
    Layout,
    accept,
    arrays,
    data_of,
    flip_bit,
    key,
    manifest_of,
)
from tests.reference.robust import combined

EXACT: dict[str, RobustRule] = {
    "median": Median(),
    "trimmed mean": TrimmedMean(0.2),
    "krum": Krum(1),
    "multi-krum": MultiKrum(1, 3),
    "bulyan": Bulyan(1),
}
CLOSE: dict[str, RobustRule] = {
    "geometric median": GeometricMedian(5),
    "norm bound": NormBound(6.0),
    "wide norm bound": NormBound(1e9),
}


class RobustRound(Round):
    """A round whose updates are judged and folded; the seed of the base is beside the clients'."""

    def __init__(self, root: Path, manifest: Manifest = MANIFEST) -> None:
        super().__init__(root, manifest)
        self.begin_from(data_of(manifest, 1000))

    def begin_from(self, data: bytes) -> None:
        writer = self.writer()
        writer.write(header_bytes(self.manifest))
        writer.write(data)
        self.base = writer.commit()

    def accepted(self, num: int, order: list[int] | None = None) -> list[SpoolEntry]:
        entries = {
            client: accept(self.spool, client, self.manifest, data_of(self.manifest, client))
            for client in order or range(num)
        }
        return [entries[client] for client in sorted(entries)]

    def judged(self, rule: RobustRule, entries: list[SpoolEntry]) -> Verdict:
        with ExitStack() as files:
            manifest, state = open_state(files, self.store, self.base)
            sources = [WholeSource(entry) for entry in entries]
            return judge(rule, sources, manifest, state, lambda: None)

    def robust(self, rule: RobustRule, entries: list[SpoolEntry]) -> bytes:
        weights = self.judged(rule, entries).weights if is_judged(rule) else ()
        places = places_read(rule, len(entries), weights)
        counted = [weights[place] if weights else 1.0 for place in places]
        read = [entries[place] for place in places]
        with ExitStack() as files:
            _, state = open_state(files, self.store, self.base)
            folded = fold_weighted_mean(
                read,
                [1.0] * len(read),
                self.manifest,
                self.writer(),
                combination=combination(rule, counted, state),
                base=state,
            )
        found, start = read_header(self.store.path(folded.state))
        assert found.stored() == self.manifest.stored()
        return self.store.path(folded.state).read_bytes()[start:]


def wide(manifest: Manifest, seed: int) -> np.ndarray:
    """All floating elements of an update."""
    parts = [np.empty(0)]
    for spec in manifest.stored():
        if dtype_named(spec.dtype).is_floating:
            raw = arrays(manifest, seed)[spec.name]
            parts.append(np.empty(raw.shape))
            widen(spec.dtype, raw, parts[-1])
    return np.concatenate(parts)


def reference(
    manifest: Manifest, rule: RobustRule, num: int, chosen: list[int]
) -> list[np.ndarray]:
    """Tensor by tensor; chosen: the updates whose integers count."""
    rows = np.stack([wide(manifest, seed) for seed in range(num)])
    values = combined(rule, rows, wide(manifest, 1000))
    out, at = [], 0
    for spec in manifest.stored():
        raws = np.stack([arrays(manifest, seed)[spec.name] for seed in range(num)])
        if dtype_named(spec.dtype).is_floating:
            result = np.empty(raws.shape[1:], storage(spec.dtype))
            narrow(spec.dtype, values[at : at + result.size], result)
            at += result.size
        else:
            result = np.sort(raws[chosen], axis=0)[(len(chosen) - 1) // 2]
        out.append(result)
    return out


def joined(found: list[np.ndarray]) -> bytes:
    return b"".join(raw.tobytes() for raw in found)


def without_signs_of_zero(manifest: Manifest, data: bytes) -> bytes:
    """Rules that sort know one zero."""
    parts = []
    for spec in manifest.stored():
        raw = np.frombuffer(
            data,
            storage(spec.dtype),
            spec.size_bytes // dtype_named(spec.dtype).item_bytes,
            spec.offset,
        ).copy()
        if dtype_named(spec.dtype).is_floating:
            values = np.empty(raw.shape)
            widen(spec.dtype, raw, values)
            narrow(spec.dtype, values + 0.0, raw)
        parts.append(raw)
    return joined(parts)


@pytest.mark.parametrize("num", [7, 8, 11])
@pytest.mark.parametrize("name", EXACT)
def test_bits_of_plain_numpy(tmp_path: Path, name: str, num: int) -> None:
    rule, a_round = EXACT[name], RobustRound(tmp_path)
    entries = a_round.accepted(num)
    chosen = list(range(num))
    if is_judged(rule):
        chosen = places_read(rule, num, a_round.judged(rule, entries).weights)
    data = a_round.robust(rule, entries)
    assert data == joined(reference(MANIFEST, rule, num, chosen))


@pytest.mark.parametrize("name", CLOSE)
def test_weights_of_plain_numpy(tmp_path: Path, name: str) -> None:
    rule, manifest = CLOSE[name], manifest_of([("a", "float64", (1000,)), ("b", "float64", ())])
    a_round = RobustRound(tmp_path, manifest)
    data = a_round.robust(rule, a_round.accepted(7))
    (first, second) = reference(manifest, rule, 7, [0])
    expected = np.concatenate([first, second])
    np.testing.assert_allclose(np.frombuffer(data, "<f8"), expected, rtol=1e-9, atol=1e-12)


def test_a_bound_that_none_exceeds_gives_the_unweighted_mean(tmp_path: Path) -> None:
    a_round = RobustRound(tmp_path, manifest := manifest_of([("a", "float32", (99,))]))
    entries = a_round.accepted(3)
    digest, *_ = fold_weighted_mean(entries, [1, 1, 1], manifest, a_round.writer())
    assert a_round.robust(NormBound(1e9), entries) == a_round.store.path(digest).read_bytes()[-396:]
    assert a_round.judged(NormBound(1e9), entries).weights == (1.0, 1.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from([spec[1] for spec in MIXED]), st.integers(0, 40)), max_size=5
    ),
    num=st.integers(7, 12),
    window=st.integers(1, 50),
    columns=st.integers(1, 9),
    name=st.sampled_from(sorted(EXACT)),
)
def test_windows_of_any_size_give_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[str, int]],
    num: int,
    window: int,
    columns: int,
    name: str,
) -> None:
    layout: Layout = [(f"t{i}", dtype, (size,)) for i, (dtype, size) in enumerate(shapes)]
    manifest, rule = manifest_of(layout), EXACT[name]
    a_round = RobustRound(tmp_path_factory.mktemp("fold"), manifest)
    entries = a_round.accepted(num)
    whole = a_round.robust(rule, entries)
    chosen = list(range(num))
    if is_judged(rule):
        chosen = places_read(rule, num, a_round.judged(rule, entries).weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold, "WINDOW_ELEMENTS", window)
        patch.setattr(sorting_network, "COLUMNS", columns)
        assert a_round.robust(rule, entries) == whole
    if not is_judged(rule):  # few elements have distances that round to equal ones
        expected = joined(reference(manifest, rule, num, chosen))
        assert without_signs_of_zero(manifest, whole) == without_signs_of_zero(manifest, expected)


@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_the_order_of_arrival_does_not_matter(tmp_path: Path, name: str) -> None:
    rule = (EXACT | CLOSE)[name]
    results = set()
    for index, order in enumerate(([0, 1, 2, 3, 4, 5, 6], [6, 3, 0, 2, 4, 1, 5])):
        a_round = RobustRound(tmp_path / str(index))
        results.add(a_round.robust(rule, a_round.accepted(7, order)))
    assert len(results) == 1


@pytest.mark.parametrize("num", range(1, 34))
def test_networks_sort_all_numbers_of_rows(num: int) -> None:
    rows = np.random.default_rng(num).integers(0, 2, (num, 400)).astype("f4")
    middle = frozenset({(num - 1) // 2})
    for wanted in (frozenset(range(num)), middle):
        found = [row.copy() for row in rows]
        sorting_network.sort_columns(found, sorting_network.network(num, wanted))
        for place in wanted:
            assert np.array_equal(found[place], np.sort(rows, axis=0)[place])
    assert len(sorting_network.network(num, middle)) <= len(
        sorting_network.network(num, frozenset(range(num)))
    )


FALSE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "far": lambda raw: raw * 0 + 1e30,
    "beyond float64": lambda raw: raw * 0 + 1e200,
    "turned": lambda raw: -50 * raw,
}


@pytest.mark.parametrize("attack", FALSE)
@pytest.mark.parametrize("name", [*EXACT, "geometric median", "norm bound"])
def test_one_false_update_leads_nowhere(tmp_path: Path, name: str, attack: str) -> None:
    rule = (EXACT | CLOSE)[name]
    manifest = manifest_of([("a", "float64", (200,))])
    a_round = RobustRound(tmp_path, manifest)
    honest = [arrays(manifest, seed)["a"] for seed in range(7)]
    false = FALSE[attack](honest[2])
    entries = [
        accept(a_round.spool, client, manifest, (false if client == 2 else raw).tobytes())
        for client, raw in enumerate(honest)
    ]
    found = np.frombuffer(a_round.robust(rule, entries), "<f8")
    away = np.linalg.norm(found - np.mean(honest, axis=0))
    assert away < 20


def test_distances_that_float32_rounds_to_nothing_are_found(tmp_path: Path) -> None:
    manifest = manifest_of([("a", "float32", (100_000,))])
    a_round = RobustRound(tmp_path, manifest)
    base = np.full(100_000, 100.0, "<f4")
    a_round.begin_from(base.tobytes())
    moved = [base + np.float32(1e-3) * (client == 1) for client in range(5)]
    entries = [
        accept(a_round.spool, client, manifest, raw.tobytes()) for client, raw in enumerate(moved)
    ]
    scores = a_round.judged(Krum(1), entries).scores
    far = float(((moved[1].astype("f8") - base.astype("f8")) ** 2).sum())
    assert scores[1] == pytest.approx(2 * far, rel=1e-6)
    assert a_round.judged(Krum(1), entries).weights == (1.0, 0.0, 0.0, 0.0, 0.0)


def test_equal_scores_go_to_the_lower_number(tmp_path: Path) -> None:
    a_round = RobustRound(tmp_path, manifest := manifest_of([("a", "float32", (5,))]))
    same = data_of(manifest, 3)
    entries = [accept(a_round.spool, client, manifest, same) for client in range(7)]
    assert a_round.judged(Krum(2), entries).weights == (1.0, *[0.0] * 6)
    assert a_round.judged(MultiKrum(2, 3), entries).weights == (1.0, 1.0, 1.0, *[0.0] * 4)
    assert a_round.judged(Bulyan(1), entries).weights == (*[1.0] * 5, 0.0, 0.0)


def test_masks_of_infinities_are_kept(tmp_path: Path) -> None:
    manifest = manifest_of([("mask", "float32", (3,)), ("w", "float32", (4,))])
    mask = np.array([0, -np.inf, np.inf], "<f4").tobytes()
    a_round = RobustRound(tmp_path, manifest)
    a_round.begin_from(mask + np.zeros(4, "<f4").tobytes())
    entries = []
    for client in range(7):
        raw = mask + np.full(4, client, "<f4").tobytes()
        spooled = a_round.spool.open(
            key(client),
            manifest,
            before=lambda spec, offset, num: np.frombuffer(
                (mask + np.zeros(4, "<f4").tobytes())[spec.offset + offset :][:num], np.uint8
            ),
        )
        spooled.write(raw)
        entries.append(spooled.commit(manifest, 1))
    for rule in (*EXACT.values(), *CLOSE.values()):
        assert a_round.robust(rule, entries)[:12] == mask


@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_damage_is_found(tmp_path: Path, name: str) -> None:
    rule, a_round = (EXACT | CLOSE)[name], RobustRound(tmp_path)
    entries = a_round.accepted(7)
    flip_bit(entries[3].path, -1)
    with pytest.raises(IntegrityError, match="damaged"):
        a_round.robust(rule, entries)


def test_a_comparison_stops_when_asked(tmp_path: Path) -> None:
    a_round, asked = RobustRound(tmp_path), threading.Event()

    def should_stop() -> None:
        asked.set()
        raise FoldStoppedError("enough")

    with ExitStack() as files:
        manifest, state = open_state(files, a_round.store, a_round.base)
        sources = [WholeSource(entry) for entry in a_round.accepted(5)]
        with pytest.raises(FoldStoppedError):
            judge(Krum(1), sources, manifest, state, should_stop)
    assert asked.is_set()


def test_sums_beyond_float64_are_refused(tmp_path: Path) -> None:
    a_round = RobustRound(tmp_path, manifest := manifest_of([("a", "float64", (2,))]))
    raw = np.full(2, 1.5e308).tobytes()
    entries = [accept(a_round.spool, client, manifest, raw) for client in range(5)]
    with pytest.raises(DivergedError, match="beyond the range"):
        a_round.robust(TrimmedMean(0.2), entries)
    assert np.frombuffer(a_round.robust(Median(), entries[:4]), "<f8").tolist() == [1.5e308] * 2


def test_blocks_of_any_size_give_equal_distances(tmp_path: Path) -> None:
    a_round = RobustRound(tmp_path)
    entries = a_round.accepted(5)
    whole = a_round.judged(Krum(1), entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "_BLOCK", 3)
        parts = a_round.judged(Krum(1), entries)
    assert parts.weights == whole.weights
    np.testing.assert_allclose(parts.scores, whole.scores, rtol=1e-12)
