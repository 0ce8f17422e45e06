"""The fold of rounds whose clients are corrected, against plain numpy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from stratagem.coordinator.updates import fold
from stratagem.coordinator.updates.weighing import ControlledMean
from tests.coordinator.updates.fold_round import BASE, Round
from tests.coordinator.updates.updates import Layout, arrays, elements, manifest_of

LAYOUT: Layout = (
    ("model/w64", "float64", (5,)),
    ("control/w64", "float64", (5,)),
    ("model/count", "int64", ()),
    ("model/w32", "float32", (7, 3)),
    ("model/mean", "float32", (4,)),
    ("control/w32", "float32", (7, 3)),
    ("control/empty", "float32", (0, 4)),
    ("model/flag", "bool", (3,)),
)
MANIFEST = manifest_of(LAYOUT)
NUM_CLIENTS = 10


class ControlledRound(Round):
    def __init__(self, root: Path) -> None:
        super().__init__(root, MANIFEST)
        self.begin()

    def controlled(
        self, rows: list[int], order: Sequence[int] = (), begins_anew: bool = False
    ) -> bytes:
        """The next state; clients come in the given order."""
        entries = self.accepted(len(rows), order)
        with self.opened() as (manifest, state):
            rule = ControlledMean(rows, NUM_CLIENTS, manifest, state, begins_anew=begins_anew)
            return self.folded(entries, rows, combination=rule)


@pytest.mark.parametrize("num", [1, 2, 7])
def test_the_mean_of_models_and_a_share_of_the_sum_of_changes(tmp_path: Path, num: int) -> None:
    rows = [3, 9, 1, 9, 2, 2, 2][:num]
    found = elements(MANIFEST, ControlledRound(tmp_path).controlled(rows))
    given, base = [arrays(MANIFEST, client) for client in range(num)], arrays(MANIFEST, BASE)
    for name in ("model/w64", "model/w32", "model/mean"):
        mean = np.sum([each[name].astype("f8") for each in given], axis=0) / num
        assert np.array_equal(found[name], mean.astype(found[name].dtype)), name
    for name in ("control/w64", "control/w32", "control/empty"):
        total = np.sum([each[name].astype("f8") for each in given], axis=0)
        moved = base[name].astype("f8") + total / NUM_CLIENTS
        assert np.array_equal(found[name], moved.astype(found[name].dtype)), name
    for name in ("model/count", "model/flag"):  # of the client with most rows, the first of equals
        assert np.array_equal(found[name], given[0 if num == 1 else 1][name]), name


def test_the_order_of_arrival_and_the_windows_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ControlledRound(tmp_path / "a").controlled([1, 2, 3])
    assert ControlledRound(tmp_path / "b").controlled([1, 2, 3], [2, 0, 1]) == expected
    monkeypatch.setattr(fold, "WINDOW_ELEMENTS", 3)
    assert ControlledRound(tmp_path / "c").controlled([1, 2, 3]) == expected


def test_the_common_variate_begins_anew_and_the_models_do_not(tmp_path: Path) -> None:
    usual = elements(MANIFEST, ControlledRound(tmp_path / "a").controlled([1, 1]))
    anew = elements(MANIFEST, ControlledRound(tmp_path / "b").controlled([1, 1], begins_anew=True))
    for name, value in anew.items():
        expected = np.zeros_like(value) if name.startswith("control/") else usual[name]
        assert value.tobytes() == expected.tobytes(), name
