"""The average of a global model over rounds, of every element type, beside the state of each."""

from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import NO_DIGEST, Digest
from stratagem.common.job import WeightAverageSpec
from stratagem.common.tensors.files import read_header
from stratagem.common.tensors.manifest import NUM_AVERAGED_KEY, dtype_named
from stratagem.coordinator.updates.fold import Folded
from stratagem.coordinator.updates.server_optimizer import global_average
from tests.coordinator.updates.fold_round import Round
from tests.coordinator.updates.updates import (
    MIXED,
    OF_RUN,
    accept,
    data_of,
    elements,
    manifest_of,
    rounded,
    wide,
)

BUFFER = next(name for name, dtype, _ in MIXED if dtype_named(dtype).is_floating)
MANIFEST = manifest_of(MIXED, metadata={"averaged": f'["{BUFFER}"]'})


def raw_of(a_round: Round, digest: Digest) -> dict[str, Any]:
    """The elements of a stored state, bit by bit."""
    manifest, start = read_header(a_round.store.path(digest))
    return elements(manifest, a_round.store.path(digest).read_bytes()[start:])


def fold(a_round: Round, spec: WeightAverageSpec, before: Digest, number: int) -> Folded:
    for client in range(2):
        accept(a_round.spool, client, MANIFEST, data_of(MANIFEST, 10 * number + client))
    average = global_average(spec, a_round.store, before, MANIFEST, number)
    a_round.folded(a_round.entries(), [3, 1], average=average)
    a_round.spool.delete_run(OF_RUN)
    assert a_round.last is not None
    return a_round.last


def between(dtype: str, mean: Any, value: Any, weight: float) -> Any:
    before, after = wide(dtype, mean), wide(dtype, value)
    return rounded(dtype, before + weight * (after - before))


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_the_average_stands_in_the_place_of_what_is_trained(tmp_path: Path, kind: Any) -> None:
    spec = WeightAverageSpec(kind=kind, decay=0.75 if kind == "ema" else None, start_step=2)
    a_round, average = Round(tmp_path, MANIFEST), NO_DIGEST
    expected: dict[str, Any] = {}
    for number in range(1, 5):
        state, _, average = fold(a_round, spec, average, number)
        present = raw_of(a_round, state)
        if number == 1:
            assert average == NO_DIGEST
            continue
        weight = 0.25 if kind == "ema" else 1 / (number - 1)
        for each in MANIFEST.stored():
            is_first = number == 2 or each.name == BUFFER
            if is_first or not dtype_named(each.dtype).is_floating:
                expected[each.name] = present[each.name]
                continue
            mean, value = expected[each.name], present[each.name]
            expected[each.name] = between(each.dtype, mean, value, weight)
        found = raw_of(a_round, average)
        assert found.keys() == expected.keys()
        assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
        manifest, _ = read_header(a_round.store.path(average))
        assert manifest.metadata[NUM_AVERAGED_KEY] == str(number - 1)
        assert number < 3 or any((found[name] != present[name]).any() for name in expected)


def test_a_round_that_is_not_averaged_leaves_it_but_for_the_buffers(tmp_path: Path) -> None:
    a_round, spec = Round(tmp_path, MANIFEST), WeightAverageSpec(start_step=1, every=2)
    first = fold(a_round, spec, NO_DIGEST, 1).average
    state, _, second = fold(a_round, spec, first, 2)
    before, after, present = (raw_of(a_round, digest) for digest in (first, second, state))
    for each in MANIFEST.stored():
        is_kept = each.name != BUFFER and dtype_named(each.dtype).is_floating
        assert after[each.name].tobytes() == (before if is_kept else present)[each.name].tobytes()
    assert read_header(a_round.store.path(second))[0].metadata[NUM_AVERAGED_KEY] == "1"


def test_a_fold_that_fails_leaves_nothing(tmp_path: Path) -> None:
    a_round = Round(tmp_path, MANIFEST)
    average = global_average(WeightAverageSpec(), a_round.store, NO_DIGEST, MANIFEST, 1)
    (entry,) = a_round.accepted(1)
    entry.path.write_bytes(b"")
    with pytest.raises(IntegrityError):
        a_round.folded([entry], [1], average=average)
    assert a_round.leftovers() == []
