"""Late updates inside the fold against whole tensors in plain numpy."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stratagem.common.base.errors import DivergedError
from stratagem.common.base.ids import Digest
from stratagem.common.strategy import parse_strategy
from stratagem.common.tensors.dtypes import dtype_named
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.safetensors_file import header_bytes, read_header
from stratagem.coordinator.store.blobs.directory_blobs import DirectoryBlobs
from stratagem.coordinator.updates.folding import fold
from stratagem.coordinator.updates.folding.fold import fold_weighted_mean
from stratagem.coordinator.updates.folding.rebasing import Rebasing
from stratagem.coordinator.updates.folding.server_optimizers import server_optimizer
from stratagem.coordinator.updates.folding.server_step import ServerStep
from stratagem.coordinator.updates.numpy_floats import Wide, narrow, storage, widen
from stratagem.coordinator.updates.spool import Spool
from tests.coordinator.updates.updates import MIXED, accept, arrays, data_of, key, manifest_of

# A frozen tensor and a buffer between trained ones; MIXED has sizes 0, 1 and odd ones.
LAYOUT = [*MIXED[:2], ("model/frozen", "float32", (7,)), *MIXED[2:], ("model/mean", "float32", ())]
AVERAGED = ("model/frozen", "model/mean")
MANIFEST = manifest_of(LAYOUT, metadata={"averaged": '["model/frozen", "model/mean"]'})
STATE, OLD, OLDER = 100, 101, 102
"""Seeds of the present state and of two earlier ones."""
MOMENTUM = {
    "type": "Federated",
    "num_clients": 9,
    "rounds": 1,
    "aggregation": {"method": "FedAvg"},
    "client_selection": {"method": "All"},
    "options": {"server_optimizer": {"name": "fedavgm", "momentum": 0.5}},
}


def wide(dtype: str, raw: np.ndarray) -> Wide:
    values = np.empty(raw.shape)
    widen(dtype, raw, values)
    return values


def reference(weights: list[float], bases: dict[int, int], *, momentum: bool = False) -> bytes:
    """Clients 0, 1, … of which some have a base of their own, by seed."""
    clients = [arrays(MANIFEST, seed) for seed in range(len(weights))]
    states = {seed: arrays(MANIFEST, seed) for seed in {STATE, *bases.values()}}
    on_time = [index for index in range(len(weights)) if index not in bases]
    out = []
    for spec in MANIFEST.stored():
        if not dtype_named(spec.dtype).is_floating:
            largest = max(on_time, key=lambda i: (weights[i], -i))
            out.append(clients[largest][spec.name])
            continue
        is_trained = spec.name not in AVERAGED
        state = wide(spec.dtype, states[STATE][spec.name])
        total = np.zeros(state.shape)
        for index, weight in enumerate(weights):
            values = wide(spec.dtype, clients[index][spec.name])
            if index in bases and is_trained:
                values = values - wide(spec.dtype, states[bases[index]][spec.name]) + state
            total = total + values * weight
        mean = total / math.fsum(weights)
        if momentum and is_trained:
            mean = state + 1.0 * (0.5 * np.zeros(state.shape) + (mean - state))
        result = np.empty(mean.shape, storage(spec.dtype))
        narrow(spec.dtype, mean, result)
        out.append(result)
    return b"".join(raw.tobytes() for raw in out)


def stored(store: DirectoryBlobs, manifest: Manifest, data: bytes) -> Digest:
    state = replace(manifest, purpose=Purpose.STATE)
    header = header_bytes(state)
    writer = store.writer(len(header) + len(data))
    writer.write(header)
    writer.write(data)
    return writer.commit()


class Round:
    def __init__(self, root: Path, manifest: Manifest = MANIFEST) -> None:
        self.manifest = manifest
        self.spool = Spool(root / "spool", quota_bytes=1 << 30)
        self.store = DirectoryBlobs(root / "blobs")
        self.states = {
            seed: stored(self.store, manifest, data_of(manifest, seed))
            for seed in (STATE, OLD, OLDER)
        }

    def fold(
        self, weights: list[float], bases: dict[int, int], server: ServerStep | None = None
    ) -> bytes:
        entries = [
            accept(self.spool, client, self.manifest, data_of(self.manifest, client))
            for client in range(len(weights))
        ]
        rebasing = Rebasing(
            self.store, self.states[STATE], {i: self.states[seed] for i, seed in bases.items()}
        )
        writer = self.store.writer(len(header_bytes(self.manifest)) + self.manifest.total_bytes)
        digest, *_ = fold_weighted_mean(
            entries, weights, self.manifest, writer, rebasing=rebasing, server=server
        )
        _, start = read_header(self.store.path(digest))
        return self.store.path(digest).read_bytes()[start:]


CASES = [
    ([3.0, 0.5], {1: OLD}),
    ([0.25, 4.0, 2.5, 1.0], {0: OLDER, 2: OLD}),
    ([7.0, 9.0], {1: OLD}),
]


@pytest.mark.parametrize("window", [1, 4, 7, fold.WINDOW_ELEMENTS])
@pytest.mark.parametrize(("weights", "bases"), CASES)
def test_late_updates_enter_with_what_they_have_changed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weights: list[float],
    bases: dict[int, int],
    window: int,
) -> None:
    monkeypatch.setattr(fold, "WINDOW_ELEMENTS", window)
    assert Round(tmp_path).fold(weights, bases) == reference(weights, bases)


def test_a_server_optimizer_gets_the_mean_of_what_was_rebased(tmp_path: Path) -> None:
    a_round = Round(tmp_path)
    optimizer = server_optimizer(parse_strategy(MOMENTUM))  # type: ignore[arg-type]
    assert optimizer is not None
    server = ServerStep(optimizer, a_round.store, a_round.states[STATE], (), {})
    weights, bases = CASES[1]
    assert a_round.fold(weights, bases, server) == reference(weights, bases, momentum=True)


def test_a_client_that_has_changed_nothing_changes_nothing(tmp_path: Path) -> None:
    """Its whole model would pull the state back to where it was."""
    manifest = manifest_of([("w", "float64", (5,))])
    a_round = Round(tmp_path, manifest)
    same = accept(a_round.spool, 0, manifest, data_of(manifest, STATE))
    idle = accept(a_round.spool, 1, manifest, data_of(manifest, OLD))
    rebasing = Rebasing(a_round.store, a_round.states[STATE], {1: a_round.states[OLD]})
    writer = a_round.store.writer(len(header_bytes(manifest)) + manifest.total_bytes)
    digest, *_ = fold_weighted_mean([same, idle], [1, 1], manifest, writer, rebasing=rebasing)
    assert a_round.store.path(digest).read_bytes()[-40:] == data_of(manifest, STATE)


def test_a_change_beyond_the_range_of_the_type_is_refused(tmp_path: Path) -> None:
    manifest = manifest_of([("w", "float32", (1,))])
    a_round = Round(tmp_path, manifest)

    def state(value: float) -> bytes:
        return np.array([value], "<f4").tobytes()

    late, high = (accept(a_round.spool, c, manifest, state(3e38)) for c in range(2))
    digests = [stored(a_round.store, manifest, state(value)) for value in (3e38, -3e38)]
    rebasing = Rebasing(a_round.store, digests[0], {0: digests[1]})
    writer = a_round.store.writer(len(header_bytes(manifest)) + manifest.total_bytes)
    with pytest.raises(DivergedError, match="beyond the range of float32"):
        fold_weighted_mean([late, high], [1, 1], manifest, writer, rebasing=rebasing)


@pytest.mark.parametrize("is_buffer", [False, True])
def test_what_was_not_finite_in_its_own_base_takes_no_part(tmp_path: Path, is_buffer: bool) -> None:
    """The client was accepted with it, as no fault of its own, and the state is finite by now."""
    metadata = {"averaged": '["w"]'} if is_buffer else {}
    manifest = manifest_of([("w", "float32", (2,))], metadata=metadata)
    a_round = Round(tmp_path, manifest)

    def state(*values: float) -> bytes:
        return np.array(values, "<f4").tobytes()

    on_time = accept(a_round.spool, 1, manifest, state(4.0, 5.0))
    writer = a_round.spool.open(key(0), manifest, before=lambda *_: np.array([np.inf, 3.0], "<f4"))
    writer.write(state(np.inf, 3.0))
    late = writer.commit(manifest, 1)
    present, base = (stored(a_round.store, manifest, state(*v)) for v in [(2, 5), (np.inf, 3.0)])
    rebasing = Rebasing(a_round.store, present, {0: base})
    out = a_round.store.writer(len(header_bytes(manifest)) + manifest.total_bytes)
    digest, *_ = fold_weighted_mean([late, on_time], [1, 1], manifest, out, rebasing=rebasing)
    found = a_round.store.path(digest).read_bytes()[-8:]
    assert found == state(3.0, 4.0 if is_buffer else 5.0)
