"""The sums of regions and their mean against a plain loop in float64, to the bit."""

import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.common.base.errors import IntegrityError
from stratagem.common.tensors.manifest import dtype_named
from stratagem.coordinator.core.facts.fact_values import Cause
from stratagem.coordinator.updates import fold
from stratagem.coordinator.updates.fold import (
    FoldStoppedError,
)
from stratagem.coordinator.updates.reading import WholeSource
from stratagem.coordinator.updates.upload import SpoolEntry, UpdateRejectedError
from stratagem.coordinator.updates.weighing import (
    MeanOfSums,
    RegionalMean,
    sums_manifest,
    write_sum,
)
from tests.coordinator.updates.fold_round import Round
from tests.coordinator.updates.updates import (
    MIXED,
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
from tests.reference.regional_mean import mean_of_regions, region_sum

MANIFEST = manifest_of(MIXED)
SUMS = sums_manifest(MANIFEST)

# Rows of the clients of one to seven regions; none of a whole region, which then sends no sum.
ROWS = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any), min_size=1, max_size=7
)


def summed(round_: Round, entries: Sequence[SpoolEntry], rows: Sequence[int]) -> bytes:
    parts: list[bytes] = []
    write_sum(entries, [float(n) for n in rows], MANIFEST, lambda data: parts.append(bytes(data)))
    return b"".join(parts)


def largest(rows: Sequence[int]) -> int:
    return max(range(len(rows)), key=lambda place: (rows[place], -place))


def by_loop(rows: Sequence[Sequence[int]]) -> tuple[list[bytes], bytes]:
    """The data of the sum of each region, and of their mean; clients have seeds 0, 1, …"""
    seeds, flat = count(), [n for region in rows for n in region]
    clients = [[arrays(MANIFEST, next(seeds)) for _ in region] for region in rows]
    everyone = [client for region in clients for client in region]
    sums: list[list[bytes]] = [[] for _ in rows]
    mean = []
    for spec in MANIFEST.stored():
        if not dtype_named(spec.dtype).is_floating:
            for place, region in enumerate(clients):
                sums[place].append(region[largest(rows[place])][spec.name].tobytes())
            mean.append(everyone[largest(flat)][spec.name].tobytes())
            continue
        of_regions = []
        for place, region in enumerate(clients):
            values = [wide(spec.dtype, client[spec.name]) for client in region]
            of_regions.append(region_sum(values, rows[place]))
            sums[place].append(of_regions[-1].tobytes())
        mean.append(rounded(spec.dtype, mean_of_regions(of_regions, flat)).tobytes())
    return [b"".join(parts) for parts in sums], b"".join(mean)


def check_against_the_loop(root: Path, rows: Sequence[Sequence[int]], window: int) -> None:
    expected, mean = by_loop(rows)
    round_, seeds = Round(root, MANIFEST), count()
    flat, places = [n for region in rows for n in region], count()
    clients = round_.accepted(len(flat))
    sums, tree = [], []
    with pytest.MonkeyPatch.context() as patch:
        for module in (fold, fold):
            patch.setattr(module, "WINDOW_ELEMENTS", window)
        for place, region in enumerate(rows):
            tree.append([next(places) for _ in region])
            data = summed(round_, [clients[next(seeds)] for _ in region], region)
            assert data == expected[place]
            sums.append(accept(round_.spool, 100 + place, SUMS, data, sum(region)))
        of_region = [at for at, region in enumerate(rows) for _ in region]
        weights = [float(sum(region)) for region in rows]
        rule = MeanOfSums(sums, weights, MANIFEST, of_region[largest(flat)])
        assert round_.folded([], [], combination=rule) == mean
        whole = RegionalMean(tree, [float(n) for n in flat])
        assert round_.folded(clients, flat, combination=whole) == mean


@settings(max_examples=5, deadline=None)
@given(ROWS, st.sampled_from([1, 2, 5, 1 << 18]))
def test_sums_and_their_mean_are_those_of_a_loop(rows: list[list[int]], window: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        check_against_the_loop(Path(root), rows, window)


@pytest.mark.parametrize(
    "rows",
    [[[7]], [[3, 1, 7]], [[0, 1, 0], [5]], [[2], [7, 1], [1], [3], [1], [4], [1]]],
    ids=["one client", "one region", "clients without rows", "seven regions"],
)
def test_regions_of_every_size(tmp_path: Path, rows: list[list[int]]) -> None:
    check_against_the_loop(tmp_path, rows, window=4)


def test_a_sum_has_the_layout_of_the_model_in_float64() -> None:
    of_model = {spec.name: spec for spec in MANIFEST.tensors}
    assert [spec.name for spec in SUMS.tensors] == [spec.name for spec in MANIFEST.tensors]
    for spec in SUMS.tensors:
        own = of_model[spec.name]
        is_floating = dtype_named(own.dtype).is_floating
        assert spec.dtype == ("float64" if is_floating else own.dtype)
        assert spec.shape == own.shape
    tied = manifest_of(
        (*MIXED[:3], ("model/tied", "float32", (7, 3))), aliases={"model/tied": "model/w32"}
    )
    (alias,) = (spec for spec in sums_manifest(tied).tensors if spec.alias_of is not None)
    assert (alias.name, alias.alias_of, alias.dtype) == ("model/tied", "model/w32", "float64")


def test_a_sum_beyond_float64_is_no_update(tmp_path: Path) -> None:
    """It is written as it is, and the spool does not accept it."""
    layout, round_ = (("model/w64", "float64", (3,)),), Round(tmp_path)
    model = manifest_of(layout)
    entry = accept(round_.spool, 0, model, np.array([1.0, 1e308, -2.0]).tobytes())
    parts: list[bytes] = []
    write_sum([entry], [7.0], model, lambda data: parts.append(bytes(data)))
    assert np.frombuffer(b"".join(parts)).tolist() == [7.0, np.inf, -14.0]
    wanted = sums_manifest(model)
    with pytest.raises(UpdateRejectedError, match="'model/w64' are not finite") as raised:
        round_.spool.open(key(1), wanted).write(b"".join(parts))
    assert raised.value.cause is Cause.NOT_FINITE


def test_damage_on_disk_and_a_wish_to_stop_end_it(tmp_path: Path) -> None:
    round_ = Round(tmp_path, MANIFEST)
    (entry,) = round_.accepted(1)
    with pytest.raises(FoldStoppedError):
        write_sum([entry], [1.0], MANIFEST, lambda _: None, lambda: True)
    total = accept(round_.spool, 1, SUMS, summed(round_, [entry], [1]))
    for damaged in (entry, total):
        flip_bit(damaged.path, damaged.data_start + 2)
    with pytest.raises(IntegrityError, match="checksum"):
        summed(round_, [entry], [1])
    rule = MeanOfSums([total], [1.0], MANIFEST, 0)
    with pytest.raises(IntegrityError, match="checksum"):
        round_.folded([], [], combination=rule)
    assert round_.leftovers() == []


MODEL = manifest_of(
    [
        ("model/count", "int64", (2,)),
        ("model/w32", "float32", (7, 3)),
        ("model/w64", "float64", (5,)),
    ]
)


def test_the_tree_decides_the_bits(tmp_path: Path) -> None:
    """In any order of regions and of clients; one region is the flat sum, and two are not."""
    weights, round_ = [3, 1, 7, 2, 5], Round(tmp_path, MODEL)
    entries = round_.accepted(5)
    flat, trees = round_.folded(entries, weights), set()
    everyone = RegionalMean([[0, 1, 2, 3, 4]], weights)
    assert round_.folded(entries, weights, combination=everyone) == flat
    for tree in ([[1, 3], [0, 2, 4]], [[0, 4, 2], [3, 1]], [[2], [0], [1], [4], [3]]):
        found = round_.folded(entries, weights, combination=RegionalMean(tree, weights))
        trees.add(found)
        for name, dtype in (("model/w32", "f4"), ("model/w64", "f8")):
            rows = [arrays(MODEL, client)[name] for client in range(5)]
            sums = [region_sum([rows[i] for i in r], [weights[i] for i in r]) for r in tree]
            expected = mean_of_regions(sums, weights).astype(dtype)
            assert elements(MODEL, found)[name].tobytes() == expected.tobytes()
            np.testing.assert_allclose(expected, elements(MODEL, flat)[name], rtol=1e-5)
    assert len(trees - {flat}) > 1


def test_integers_are_of_the_client_with_most_rows(tmp_path: Path) -> None:
    """Where clients do not agree, that is reported; all are read."""
    (spec,) = (spec for spec in MODEL.tensors if spec.name == "model/count")
    round_ = Round(tmp_path, MODEL)
    for client in range(2):
        data = bytearray(data_of(MODEL, client))
        counts = np.array([client, 7], np.int64)
        data[spec.offset : spec.offset + spec.size_bytes] = counts.tobytes()
        accept(round_.spool, client, MODEL, bytes(data))
    entries = round_.entries()
    sources = [WholeSource(entry) for entry in entries]
    for weights, expected in (([2, 3], 1), ([3, 3], 0)):
        out = np.empty(2, np.int64)
        combination = RegionalMean([[1], [0]], weights)
        taken = combination.integers(sources, "int64", spec.offset, out)
        assert taken == "the one with most samples"
        assert out.tolist() == [expected, 7]
    same = [sources[0], WholeSource(entries[0])]
    assert not RegionalMean([[1], [0]], [1, 1]).integers(same, "int64", spec.offset, out)
