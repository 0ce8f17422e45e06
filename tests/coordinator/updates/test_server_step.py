"""Server optimizers inside the fold against whole tensors in plain numpy, over several rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.common.strategy import parse_strategy
from stratagem.common.tensors.files import read_header
from stratagem.common.tensors.manifest import Manifest, dtype_named
from stratagem.coordinator.store.blobs import DirectoryBlobs
from stratagem.coordinator.updates import fold
from stratagem.coordinator.updates.server_optimizer import ServerStep, server_optimizer
from tests.coordinator.updates.fold_round import Round
from tests.coordinator.updates.updates import (
    FEDERATED,
    MIXED,
    OF_RUN,
    accept,
    arrays,
    data_of,
    elements,
    flip_bit,
    manifest_of,
    rounded,
    wide,
)
from tests.reference.server_optimizer import server_step

# A frozen tensor and a buffer between trained ones; MIXED has sizes 0, 1 and odd ones.
LAYOUT = [*MIXED[:2], ("model/frozen", "float32", (7,)), *MIXED[2:], ("model/mean", "float32", ())]
AVERAGED = '["model/frozen", "model/mean"]'
MANIFEST = manifest_of(LAYOUT, metadata={"averaged": AVERAGED})
WEIGHTS = [3, 1]


YOGI = {"method": "FedYogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "yogi": {"aggregation": YOGI, "options": {"server_learning_rate": 0.05}},
    "adam": {"options": {"server_optimizer": {"name": "fedadam", "beta1": 0.8}}},
    "adagrad": {"options": {"server_optimizer": {"name": "fedadagrad", "learning_rate": 0.2}}},
    "momentum": {"options": {"server_optimizer": {"name": "fedavgm"}}},
}


def strategy_of(case: str) -> Any:
    return parse_strategy({**FEDERATED, **CASES[case]})


class Server(Round):
    """Rounds of two clients, one after the other."""

    def __init__(self, root: Path, case: str, manifest: Manifest = MANIFEST) -> None:
        super().__init__(root, manifest)
        found = server_optimizer(strategy_of(case))
        assert found is not None
        self.optimizer = found
        self.begin(data_of(manifest, 99))
        self.slots: tuple[Digest, ...] = ()

    def step(self, number: int) -> ServerStep:
        return ServerStep(self.optimizer, self.store, self.base, self.slots, {"round": str(number)})

    def round(self, number: int) -> dict[str, Any]:
        """Fold one round; the raw tensors of the next state."""
        for client in range(2):
            data = data_of(self.manifest, number * 10 + client)
            accept(self.spool, client, self.manifest, data)
        found = self.folded(self.entries(), WEIGHTS, server=self.step(number))
        self.spool.delete_run(OF_RUN)
        assert self.last is not None
        self.base, self.slots, _ = self.last
        return elements(self.manifest, found)


@pytest.mark.parametrize(("case", "window"), [*((case, 3) for case in CASES), ("yogi", 1 << 18)])
def test_bits_of_the_reference_over_rounds(
    tmp_path: Path, case: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "WINDOW_ELEMENTS", window)
    server, world = Server(tmp_path, case), arrays(MANIFEST, 99)
    kept: dict[str, dict[str, Tensor]] = {name: {} for name in world}
    for number in range(1, 4):
        found = server.round(number)
        clients = [arrays(MANIFEST, number * 10 + client) for client in range(2)]
        for name, dtype, _ in LAYOUT:
            values = [each[name] for each in clients]
            expected = values[0]
            if dtype_named(dtype).is_floating:
                first, second = (wide(dtype, raw) for raw in values)
                mean = (3 * first + second) / 4
                if name not in AVERAGED:
                    x = torch.from_numpy(wide(dtype, world[name]))
                    x = x if dtype == "float64" else x.float()
                    step = server_step(strategy_of(case), x, torch.from_numpy(mean), kept[name])
                    mean = step.numpy()
                expected = rounded(dtype, mean)
            world[name] = expected
            assert found[name].tobytes() == expected.tobytes(), name


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
