"""Server optimizers inside the fold against whole tensors in plain numpy, over several rounds."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.common.base.errors import DivergedError, IntegrityError
from stratagem.common.strategy import parse_strategy
from stratagem.common.tensors.dtypes import dtype_named
from stratagem.common.tensors.manifest import Manifest
from stratagem.common.tensors.safetensors_file import header_bytes, read_header
from stratagem.coordinator.store.blobs.directory_blobs import DirectoryBlobs
from stratagem.coordinator.updates.folding import fold
from stratagem.coordinator.updates.folding.fold import fold_weighted_mean
from stratagem.coordinator.updates.folding.server_optimizers import server_optimizer
from stratagem.coordinator.updates.folding.server_step import ServerStep, slot_dtype
from stratagem.coordinator.updates.numpy_floats import narrow, storage, widen
from stratagem.coordinator.updates.spool import Spool
from tests.coordinator.updates.updates import (
    MIXED,
    OF_RUN,
    accept,
    arrays,
    data_of,
    flip_bit,
    manifest_of,
)

# A frozen tensor and a buffer between trained ones; MIXED has sizes 0, 1 and odd ones.
LAYOUT = [*MIXED[:2], ("model/frozen", "float32", (7,)), *MIXED[2:], ("model/mean", "float32", ())]
AVERAGED = '["model/frozen", "model/mean"]'
MANIFEST = manifest_of(LAYOUT, metadata={"averaged": AVERAGED})
WEIGHTS = [3, 1]

Arrays = dict[str, Any]


def yogi(x: Any, mean: Any, slots: Arrays, tau: float = 0.01) -> Any:
    delta = mean - x
    m = 0.9 * slots.get("m", np.zeros_like(x)) + (1 - 0.9) * delta
    v = slots.get("v", np.full_like(x, tau * tau))
    v = v - (1 - 0.99) * (delta * delta) * np.sign(v - delta * delta)
    slots.update(m=m, v=v)
    return x + 0.05 * m / (np.sqrt(v) + tau)


def adam(x: Any, mean: Any, slots: Arrays) -> Any:
    delta = mean - x
    m = 0.8 * slots.get("m", np.zeros_like(x)) + (1 - 0.8) * delta
    v = 0.99 * slots.get("v", np.full_like(x, 0.001 * 0.001)) + (1 - 0.99) * (delta * delta)
    slots.update(m=m, v=v)
    return x + 0.1 * m / (np.sqrt(v) + 0.001)


def adagrad(x: Any, mean: Any, slots: Arrays) -> Any:
    delta = mean - x
    slots["v"] = slots.get("v", np.full_like(x, 0.001 * 0.001)) + delta * delta
    return x + 0.2 * delta / (np.sqrt(slots["v"]) + 0.001)


def avg_m(x: Any, mean: Any, slots: Arrays) -> Any:
    slots["m"] = 0.9 * slots.get("m", np.zeros_like(x)) + (mean - x)
    return x + 1.0 * slots["m"]


YOGI = {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.01}
AVG = {"method": "FedAvg"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[..., Any]]] = {
    "yogi": (YOGI, {"server_learning_rate": 0.05}, yogi),
    "adam": (AVG, {"server_optimizer": {"name": "fedadam", "beta1": 0.8}}, adam),
    "adagrad": (AVG, {"server_optimizer": {"name": "fedadagrad", "learning_rate": 0.2}}, adagrad),
    "momentum": (AVG, {"server_optimizer": {"name": "fedavgm"}}, avg_m),
}


def optimizer_of(case: str) -> Any:
    aggregation, options, _ = CASES[case]
    document = {
        "type": "Federated",
        "num_clients": 2,
        "rounds": 3,
        "aggregation": aggregation,
        "client_selection": {"method": "All"},
        "options": options,
    }
    return server_optimizer(parse_strategy(document))  # type: ignore[arg-type]


class Server:
    """A store with a base, and rounds of two clients on it."""

    def __init__(self, root: Path, case: str, manifest: Manifest = MANIFEST) -> None:
        self.spool = Spool(root / "spool", quota_bytes=1 << 20)
        self.store = DirectoryBlobs(root / "blobs")
        self.manifest = manifest
        self.optimizer = optimizer_of(case)
        writer = self.writer()
        writer.write(header_bytes(manifest))
        writer.write(data_of(manifest, 99))
        self.base = writer.commit()
        self.slots: tuple[Any, ...] = ()

    def writer(self) -> Any:
        return self.store.writer(len(header_bytes(self.manifest)) + self.manifest.total_bytes)

    def step(self, number: int) -> ServerStep:
        return ServerStep(self.optimizer, self.store, self.base, self.slots, {"round": str(number)})

    def round(self, number: int) -> dict[str, Any]:
        """Fold one round; the raw tensors of the next state."""
        entries = [
            accept(self.spool, client, self.manifest, data_of(self.manifest, number * 10 + client))
            for client in range(2)
        ]
        self.base, self.slots, _ = fold_weighted_mean(
            entries, WEIGHTS, self.manifest, self.writer(), server=self.step(number)
        )
        self.spool.delete_run(OF_RUN)
        manifest, start = read_header(self.store.path(self.base))
        data = self.store.path(self.base).read_bytes()[start:]
        return {
            spec.name: np.frombuffer(
                data[spec.offset : spec.offset + spec.size_bytes], storage(spec.dtype)
            )
            for spec in manifest.stored()
        }


def wide(dtype: str, raw: Any) -> Any:
    values = np.empty(raw.shape)
    widen(dtype, raw, values)
    return values


def rounded(dtype: str, values: Any) -> Any:
    raw = np.empty(values.shape, storage(dtype))
    narrow(dtype, values, raw)
    return raw


@pytest.mark.parametrize("window", [3, 1 << 18])
@pytest.mark.parametrize("case", CASES)
def test_bits_of_plain_numpy_over_rounds(
    tmp_path: Path, case: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "WINDOW_ELEMENTS", window)
    server, step = Server(tmp_path, case), CASES[case][2]
    world = arrays(MANIFEST, 99)
    kept: dict[str, Arrays] = {name: {} for name in world}
    for number in range(1, 4):
        found = server.round(number)
        clients = [arrays(MANIFEST, number * 10 + client) for client in range(2)]
        for spec in MANIFEST.stored():
            if not dtype_named(spec.dtype).is_floating:
                assert found[spec.name].tobytes() == clients[0][spec.name].tobytes()
                continue
            terms = [
                w * wide(spec.dtype, c[spec.name]) for c, w in zip(clients, WEIGHTS, strict=True)
            ]
            mean = (terms[0] + terms[1]) / sum(WEIGHTS)
            if spec.name not in AVERAGED:
                slots = kept[spec.name]
                mean = step(wide(spec.dtype, world[spec.name]), mean, slots)
                dtype = slot_dtype(spec.dtype)
                for name, values in slots.items():
                    slots[name] = wide(dtype, rounded(dtype, values))
            world[spec.name] = rounded(spec.dtype, mean)
            assert found[spec.name].tobytes() == world[spec.name].tobytes(), spec.name


def test_slots_are_blobs_of_the_trained_tensors_alone(tmp_path: Path) -> None:
    server = Server(tmp_path, "yogi")
    server.round(1)
    names = [n for n, dtype, _ in LAYOUT if dtype_named(dtype).is_floating and n not in AVERAGED]
    for digest, slot in zip(server.slots, ("m", "v"), strict=True):
        manifest, _ = read_header(server.store.path(digest))
        assert [spec.name for spec in manifest.stored()] == names
        assert manifest.metadata == {"round": "1", "slot": slot}
        assert {spec.dtype for spec in manifest.stored()} == {"float32", "float64"}


def test_a_round_that_is_done_again_gives_the_same_bits(tmp_path: Path) -> None:
    server = Server(tmp_path, "adam")
    server.round(1)
    before = (server.base, server.slots)
    server.round(2)
    after = (server.base, server.slots)
    server.base, server.slots = before
    server.round(2)
    assert (server.base, server.slots) == after


def test_damaged_slots_are_found_and_nothing_is_left(tmp_path: Path) -> None:
    server = Server(tmp_path, "momentum")
    server.round(1)
    flip_bit(server.store.path(server.slots[0]), -1)
    again = DirectoryBlobs(tmp_path / "blobs")
    with pytest.raises(IntegrityError, match="damaged"):
        ServerStep(server.optimizer, again, server.base, server.slots, {})
    assert not list((tmp_path / "blobs" / "tmp").iterdir())


def test_a_step_beyond_the_range_is_refused(tmp_path: Path) -> None:
    manifest = manifest_of([("w", "float64", (1,))])
    server = Server(tmp_path, "momentum", manifest)
    server.optimizer = replace(
        server.optimizer, step=lambda slots, delta: (slots, np.full_like(delta, np.inf))
    )
    with pytest.raises(DivergedError, match="server optimizer"):
        server.round(1)
    assert not list((tmp_path / "blobs" / "tmp").iterdir())
