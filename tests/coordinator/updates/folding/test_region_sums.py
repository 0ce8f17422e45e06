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
from stratagem.common.tensors.dtypes import dtype_named
from stratagem.common.tensors.safetensors_file import read_header
from stratagem.coordinator.core.facts.rejection_causes import Cause
from stratagem.coordinator.updates.folding import region_sums, regional_mean
from stratagem.coordinator.updates.folding.fold import FoldStoppedError, fold_weighted_mean
from stratagem.coordinator.updates.folding.region_sums import (
    MeanOfSums,
    sums_manifest,
    write_sum,
)
from stratagem.coordinator.updates.folding.regional_mean import RegionalMean
from stratagem.coordinator.updates.numpy_floats import narrow, storage, widen
from stratagem.coordinator.updates.spool_upload import SpoolEntry
from stratagem.coordinator.updates.update_checks import UpdateRejectedError
from tests.coordinator.updates.fold_round import Round
from tests.coordinator.updates.updates import (
    MIXED,
    accept,
    arrays,
    data_of,
    flip_bit,
    key,
    manifest_of,
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
            values = [np.empty(client[spec.name].size) for client in region]
            for client, value in zip(region, values, strict=True):
                widen(spec.dtype, client[spec.name], value)
            of_regions.append(region_sum(values, rows[place]))
            sums[place].append(of_regions[-1].tobytes())
        rounded = np.empty(of_regions[0].size, storage(spec.dtype))
        narrow(spec.dtype, mean_of_regions(of_regions, flat), rounded)
        mean.append(rounded.tobytes())
    return [b"".join(parts) for parts in sums], b"".join(mean)


def check_against_the_loop(root: Path, rows: Sequence[Sequence[int]], window: int) -> None:
    expected, mean = by_loop(rows)
    round_, seeds = Round(root, MANIFEST), count()
    flat, places = [n for region in rows for n in region], count()
    clients = [accept(round_.spool, n, MANIFEST, data_of(MANIFEST, n)) for n in range(len(flat))]
    sums, tree = [], []
    with pytest.MonkeyPatch.context() as patch:
        for module in (region_sums, regional_mean):
            patch.setattr(module, "WINDOW_ELEMENTS", window)
        for place, region in enumerate(rows):
            tree.append([next(places) for _ in region])
            data = summed(round_, [clients[next(seeds)] for _ in region], region)
            assert data == expected[place]
            sums.append(accept(round_.spool, 100 + place, SUMS, data, sum(region)))
        of_region = [at for at, region in enumerate(rows) for _ in region]
        weights = [float(sum(region)) for region in rows]
        rule = MeanOfSums(sums, weights, MANIFEST, of_region[largest(flat)])
        told, *_ = fold_weighted_mean([], [], MANIFEST, round_.writer(), combination=rule)
        whole = RegionalMean(tree, [float(n) for n in flat])
        of_all, *_ = fold_weighted_mean(clients, flat, MANIFEST, round_.writer(), combination=whole)
    _, start = read_header(round_.store.path(told))
    assert round_.store.path(told).read_bytes()[start:] == mean
    assert told == of_all, "where a region is added up has decided the bits"


@settings(max_examples=8, deadline=None)
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
    entry = accept(round_.spool, 0, MANIFEST, data_of(MANIFEST, 0))
    with pytest.raises(FoldStoppedError):
        write_sum([entry], [1.0], MANIFEST, lambda _: None, lambda: True)
    total = accept(round_.spool, 1, SUMS, summed(round_, [entry], [1]))
    for damaged in (entry, total):
        flip_bit(damaged.path, damaged.data_start + 2)
    with pytest.raises(IntegrityError, match="checksum"):
        summed(round_, [entry], [1])
    rule = MeanOfSums([total], [1.0], MANIFEST, 0)
    with pytest.raises(IntegrityError, match="checksum"):
        fold_weighted_mean([], [], MANIFEST, round_.writer(), combination=rule)
    assert round_.leftovers() == []
