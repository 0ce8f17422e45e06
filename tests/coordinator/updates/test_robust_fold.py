"""Folds under robust rules against plain numpy, at sizes that divide evenly into nothing."""

import threading
from collections.abc import Callable
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
from stratagem.common.tensors.manifest import Manifest, TensorSpec, dtype_named
from stratagem.coordinator.updates import fold
from stratagem.coordinator.updates import robust as changes
from stratagem.coordinator.updates import robust as sorting_network
from stratagem.coordinator.updates.floats import Raw
from stratagem.coordinator.updates.fold import FoldStoppedError
from stratagem.coordinator.updates.reading import WholeSource
from stratagem.coordinator.updates.robust import Verdict, combination, judge, places_read
from stratagem.coordinator.updates.upload import SpoolEntry
from tests.coordinator.updates.fold_round import BASE, MANIFEST, Round
from tests.coordinator.updates.updates import (
    MIXED,
    Layout,
    accept,
    arrays,
    data_of,
    elements,
    flip_bit,
    key,
    manifest_of,
    rounded,
    wide,
)
from tests.every_pair import every_value
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
    """A round whose updates are judged and folded."""

    def __init__(self, root: Path, manifest: Manifest = MANIFEST, base: bytes = b"") -> None:
        super().__init__(root, manifest)
        self.begin(base)

    def sent(self, *data: bytes) -> list[SpoolEntry]:
        """The updates of clients 0, 1, … with these data."""
        return [accept(self.spool, n, self.manifest, each) for n, each in enumerate(data)]

    def judged(self, rule: RobustRule, entries: list[SpoolEntry]) -> Verdict:
        with self.opened() as (manifest, state):
            return judge(
                rule, [WholeSource(each) for each in entries], manifest, state, lambda: None
            )

    def robust(self, rule: RobustRule, entries: list[SpoolEntry]) -> bytes:
        weights = self.judged(rule, entries).weights if is_judged(rule) else ()
        places = places_read(rule, len(entries), weights)
        counted = [weights[place] if weights else 1.0 for place in places]
        read = [entries[place] for place in places]
        with self.opened() as (_, state):
            made = combination(rule, counted, state)
            return self.folded(read, [1.0] * len(read), combination=made, base=state)


def vector(manifest: Manifest, seed: int) -> np.ndarray:
    """All floating elements of an update."""
    found = arrays(manifest, seed)
    floats = [each for each in manifest.stored() if dtype_named(each.dtype).is_floating]
    return np.concatenate([np.empty(0), *(wide(each.dtype, found[each.name]) for each in floats)])


def reference(manifest: Manifest, rule: RobustRule, num: int, chosen: list[int]) -> bytes:
    """Tensor by tensor; chosen: the updates whose integers count."""
    rows = np.stack([vector(manifest, seed) for seed in range(num)])
    values = combined(rule, rows, vector(manifest, BASE))
    out, at = [], 0
    for spec in manifest.stored():
        raws = np.stack([arrays(manifest, seed)[spec.name] for seed in range(num)])
        if dtype_named(spec.dtype).is_floating:
            out.append(rounded(spec.dtype, values[at : at + raws[0].size]))
            at += raws[0].size
        else:
            out.append(np.sort(raws[chosen], axis=0)[(len(chosen) - 1) // 2])
    return b"".join(raw.tobytes() for raw in out)


def without_signs_of_zero(manifest: Manifest, data: bytes) -> bytes:
    """Rules that sort know one zero."""
    found = elements(manifest, data)
    for spec in manifest.stored():
        if dtype_named(spec.dtype).is_floating:
            found[spec.name] = rounded(spec.dtype, wide(spec.dtype, found[spec.name]) + 0.0)
    return b"".join(raw.tobytes() for raw in found.values())


@pytest.mark.parametrize(
    ("name", "num"),
    [*((name, 7) for name in EXACT), ("median", 8), ("trimmed mean", 8), ("bulyan", 11)],
)
def test_bits_of_plain_numpy_in_any_order_of_arrival(tmp_path: Path, name: str, num: int) -> None:
    rule, a_round = EXACT[name], RobustRound(tmp_path)
    entries, chosen = a_round.accepted(num, [*range(1, num, 2), *range(0, num, 2)]), [*range(num)]
    if is_judged(rule):
        chosen = places_read(rule, num, a_round.judged(rule, entries).weights)
    assert a_round.robust(rule, entries) == reference(MANIFEST, rule, num, chosen)


@pytest.mark.parametrize("name", CLOSE)
def test_weights_of_plain_numpy(tmp_path: Path, name: str) -> None:
    rule, manifest = CLOSE[name], manifest_of([("a", "float64", (1000,)), ("b", "float64", ())])
    in_order, mixed = (RobustRound(tmp_path / each, manifest) for each in "ab")
    data = in_order.robust(rule, in_order.accepted(7))
    expected = np.frombuffer(reference(manifest, rule, 7, [0]), "<f8")
    np.testing.assert_allclose(np.frombuffer(data, "<f8"), expected, rtol=1e-9, atol=1e-12)
    assert mixed.robust(rule, mixed.accepted(7, [6, 3, 0, 2, 4, 1, 5])) == data


def test_a_bound_that_none_exceeds_gives_the_unweighted_mean(tmp_path: Path) -> None:
    a_round = RobustRound(tmp_path, manifest_of([("a", "float32", (99,))]))
    entries = a_round.accepted(3)
    assert a_round.robust(NormBound(1e9), entries) == a_round.folded(entries, [1, 1, 1])
    assert a_round.judged(NormBound(1e9), entries).weights == (1.0, 1.0, 1.0)


@settings(max_examples=15, deadline=None)
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
        expected = reference(manifest, rule, num, chosen)
        assert without_signs_of_zero(manifest, whole) == without_signs_of_zero(manifest, expected)


def test_networks_sort_all_numbers_of_rows() -> None:
    for num in range(1, 34):
        rows = np.random.default_rng(num).integers(0, 2, (num, 400)).astype("f4")
        everything, middle = frozenset(range(num)), frozenset({(num - 1) // 2})
        for wanted in (everything, middle):
            found = [row.copy() for row in rows]
            sorting_network.sort_columns(found, sorting_network.network(num, wanted))
            for place in wanted:
                assert np.array_equal(found[place], np.sort(rows, axis=0)[place])
        sizes = [len(sorting_network.network(num, wanted)) for wanted in (middle, everything)]
        assert sizes == sorted(sizes)


FALSE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "far": lambda raw: raw * 0 + 1e30,
    "beyond float64": lambda raw: raw * 0 + 1e200,
    "turned": lambda raw: -50 * raw,
}


ROBUST = [*EXACT, "geometric median", "norm bound"]


@pytest.mark.parametrize(
    ("name", "attack"),
    [*((name, "beyond float64") for name in ROBUST), *every_value(ROBUST, ["far", "turned"])],
)
def test_one_false_update_leads_nowhere(tmp_path: Path, name: str, attack: str) -> None:
    manifest = manifest_of([("a", "float64", (200,))])
    a_round = RobustRound(tmp_path, manifest)
    honest = [arrays(manifest, seed)["a"] for seed in range(7)]
    sent = [*honest[:2], FALSE[attack](honest[2]), *honest[3:]]
    entries = a_round.sent(*(raw.tobytes() for raw in sent))
    found = np.frombuffer(a_round.robust((EXACT | CLOSE)[name], entries), "<f8")
    assert np.linalg.norm(found - np.mean(honest, axis=0)) < 20


def test_distances_that_float32_rounds_to_nothing_are_found(tmp_path: Path) -> None:
    base = np.full(100_000, 100.0, "<f4")
    a_round = RobustRound(tmp_path, manifest_of([("a", "float32", base.shape)]), base.tobytes())
    moved = [base + np.float32(1e-3) * (client == 1) for client in range(5)]
    verdict = a_round.judged(Krum(1), a_round.sent(*(raw.tobytes() for raw in moved)))
    far = float(((moved[1].astype("f8") - base.astype("f8")) ** 2).sum())
    assert verdict.scores[1] == pytest.approx(2 * far, rel=1e-6)
    assert verdict.weights == (1.0, 0.0, 0.0, 0.0, 0.0)


def test_equal_scores_go_to_the_lower_number(tmp_path: Path) -> None:
    a_round = RobustRound(tmp_path, manifest := manifest_of([("a", "float32", (5,))]))
    entries = a_round.sent(*[data_of(manifest, 3)] * 7)
    assert a_round.judged(Krum(2), entries).weights == (1.0, *[0.0] * 6)
    assert a_round.judged(MultiKrum(2, 3), entries).weights == (1.0, 1.0, 1.0, *[0.0] * 4)
    assert a_round.judged(Bulyan(1), entries).weights == (*[1.0] * 5, 0.0, 0.0)


def test_masks_of_infinities_are_kept(tmp_path: Path) -> None:
    manifest = manifest_of([("mask", "float32", (3,)), ("w", "float32", (4,))])
    mask = np.array([0, -np.inf, np.inf], "<f4").tobytes()
    base = mask + bytes(16)
    a_round = RobustRound(tmp_path, manifest, base)

    def before(spec: TensorSpec, offset: int, num: int) -> Raw:
        return np.frombuffer(base[spec.offset + offset :][:num], np.uint8)

    entries = []
    for client in range(7):
        spooled = a_round.spool.open(key(client), manifest, before=before)
        spooled.write(mask + np.full(4, client, "<f4").tobytes())
        entries.append(spooled.commit(manifest, 1))
    for rule in (*EXACT.values(), *CLOSE.values()):
        assert a_round.robust(rule, entries)[:12] == mask


@pytest.mark.parametrize("name", ["median", "krum", "geometric median", "norm bound"])
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

    sources = [WholeSource(entry) for entry in a_round.accepted(5)]
    with a_round.opened() as (manifest, state), pytest.raises(FoldStoppedError):
        judge(Krum(1), sources, manifest, state, should_stop)
    assert asked.is_set()


def test_sums_beyond_float64_are_refused(tmp_path: Path) -> None:
    a_round = RobustRound(tmp_path, manifest_of([("a", "float64", (2,))]))
    entries = a_round.sent(*[np.full(2, 1.5e308).tobytes()] * 5)
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
