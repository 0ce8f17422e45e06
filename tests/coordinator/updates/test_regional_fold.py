"""The fold in regions against plain numpy, to the bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.common.tensors.safetensors_file import read_header
from stratagem.coordinator.updates.folding.fold import fold_weighted_mean
from stratagem.coordinator.updates.folding.regional_mean import RegionalMean
from stratagem.coordinator.updates.update_sources import WholeSource
from tests.coordinator.updates.fold_round import FOLDER, Round
from tests.coordinator.updates.updates import Layout, accept, data_of, manifest_of
from tests.reference.regional_mean import mean_of_regions, region_sum

LAYOUT: Layout = (
    ("model/count", "int64", (2,)),
    ("model/empty", "float32", (0, 4)),
    ("model/h16", "float16", (9,)),
    ("model/w32", "float32", (7, 3)),
    ("model/w64", "float64", (5,)),
)
MANIFEST = manifest_of(LAYOUT)


def folded(root: Path, weights: list[int], regions: Sequence[Sequence[int]] = ()) -> bytes:
    """The data of the mean of clients 0, 1, …; without regions that of all at once."""
    round_ = Round(root, MANIFEST)
    for client in range(len(weights)):
        accept(round_.spool, client, MANIFEST, data_of(MANIFEST, client))
    entries = [entry for _, entry in sorted(round_.spool.entries(*FOLDER).items())]
    combination = RegionalMean(regions, weights) if regions else None
    digest, *_ = fold_weighted_mean(
        entries, weights, MANIFEST, round_.writer(), combination=combination
    )
    _, start = read_header(round_.store.path(digest))
    return round_.store.path(digest).read_bytes()[start:]


def tensor(data: bytes, name: str) -> np.ndarray[Any, Any]:
    (spec,) = (spec for spec in MANIFEST.tensors if spec.name == name)
    piece = data[spec.offset : spec.offset + spec.size_bytes]
    return np.frombuffer(piece, spec.dtype).reshape(spec.shape)


CASES: dict[str, tuple[list[int], list[list[int]]]] = {
    "two regions": ([3, 1, 7, 2, 5], [[1, 3], [0, 2, 4]]),
    "order of regions": ([3, 1, 7, 2, 5], [[0, 2, 4], [1, 3]]),
    "each its own": ([3, 1, 7], [[2], [0], [1]]),
    "one region": ([3, 1, 7], [[0, 1, 2]]),
    "one client": ([7], [[0]]),
    "no rows": ([0, 4, 0, 1], [[0, 2], [1, 3]]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tree_decides_the_bits(tmp_path: Path, case: str) -> None:
    """Sums that regions make by themselves give the state that one coordinator makes of all."""
    weights, regions = CASES[case]
    data = folded(tmp_path, weights, regions)
    updates = [data_of(MANIFEST, client) for client in range(len(weights))]
    for spec in MANIFEST.tensors:
        if spec.dtype == "int64":
            continue
        of_clients = [tensor(update, spec.name) for update in updates]
        with np.errstate(all="ignore"):
            sums = [
                region_sum([of_clients[i] for i in region], [weights[i] for i in region])
                for region in regions
            ]
            expected = mean_of_regions(sums, weights).astype(spec.dtype)
        found = tensor(data, spec.name)
        assert found.tobytes() == expected.tobytes(), spec.name
    largest = max(range(len(weights)), key=lambda i: (weights[i], -i))
    counts = tensor(updates[largest], "model/count")
    assert tensor(data, "model/count").tobytes() == counts.tobytes()


def test_one_region_is_the_flat_sum_and_two_are_not(tmp_path: Path) -> None:
    weights = [3, 1, 7, 2, 5]
    flat = folded(tmp_path / "flat", weights)
    assert folded(tmp_path / "one", weights, [[0, 1, 2, 3, 4]]) == flat
    apart = folded(tmp_path / "two", weights, [[1, 3], [0, 2, 4]])
    assert apart != flat
    for name in ("model/w32", "model/w64"):
        np.testing.assert_allclose(tensor(apart, name), tensor(flat, name), rtol=1e-6)


def test_integers_are_of_the_client_with_most_rows(tmp_path: Path) -> None:
    """Where clients do not agree, that is reported; all are read."""
    (spec,) = (spec for spec in MANIFEST.tensors if spec.name == "model/count")
    round_ = Round(tmp_path, MANIFEST)
    for client in range(2):
        data = bytearray(data_of(MANIFEST, client))
        counts = np.array([client, 7], np.int64)
        data[spec.offset : spec.offset + spec.size_bytes] = counts.tobytes()
        accept(round_.spool, client, MANIFEST, bytes(data))
    entries = [entry for _, entry in sorted(round_.spool.entries(*FOLDER).items())]
    sources = [WholeSource(entry) for entry in entries]
    for weights, expected in (([2, 3], 1), ([3, 3], 0)):
        out = np.empty(2, np.int64)
        combination = RegionalMean([[1], [0]], weights)
        taken = combination.integers(sources, "int64", spec.offset, out)
        assert taken == "the one with most samples"
        assert out.tolist() == [expected, 7]
    same = [sources[0], WholeSource(entries[0])]
    assert not RegionalMean([[1], [0]], [1, 1]).integers(same, "int64", spec.offset, out)
