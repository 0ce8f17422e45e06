"""A client's coded update on its way into the spool: what is taken, and what is rejected alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratagem.common.base.ids import Digest
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest
from stratagem.common.tensors.safetensors_file import header_bytes
from stratagem.coordinator.effects.federated.coded_client_update import CodedUpload
from stratagem.coordinator.store.blobs import DirectoryBlobs
from stratagem.coordinator.updates.spool import Spool, SpoolEntry, SpoolKey, SpoolRun
from stratagem.coordinator.updates.update_checks import UpdateRejectedError
from stratagem.worker.engine.trainers.federated_client import ClientRound
from stratagem.worker.plans.client_update_codec import coded_update
from stratagem.worker.session.session_states import Frozen
from tests.coordinator.updates.updates import ROOT, RUN
from tests.worker.engine.support import job

STATE = {
    "model/weight": torch.arange(21.0).reshape(3, 7),
    "model/mean": torch.ones(3),
    "model/count": torch.tensor(4),
}
TRAINED = frozenset({"model/weight"})


def spec(codec: Any = "int8") -> Any:
    strategy = {
        "type": "Federated",
        "num_clients": 2,
        "rounds": 1,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
    }
    return job("mlp", compression=codec, strategy=strategy, steps=None)


def update(moved: torch.Tensor, **changes: torch.Tensor) -> Frozen | None:
    tensors = {**STATE, "model/weight": STATE["model/weight"] + moved, **changes}
    done = ClientRound(tensors, 5, 0.1, 1, {}, TRAINED)
    coded = coded_update(spec(), done, STATE, 1, 0)
    return None if coded is None else coded[0]


class Place:
    """A store that holds the state, and an empty spool."""

    def __init__(self, folder: Path) -> None:
        self.blobs = DirectoryBlobs(folder / "blobs")
        self.spool = Spool(folder / "spool", quota_bytes=1 << 20)
        order = ("model/count", "model/weight", "model/mean")
        names = {"torch.int64": "int64", "torch.float32": "float32"}
        named = [(n, names[str(STATE[n].dtype)], tuple(STATE[n].shape)) for n in order]
        self.expected = build_manifest(named, Purpose.STATE)
        header = header_bytes(self.expected)
        writer = self.blobs.writer(len(header) + self.expected.total_bytes)
        writer.write(header)
        for name in order:
            writer.write(STATE[name].numpy().tobytes())
        self.base: Digest = writer.commit()

    def enter(self, manifest: Manifest, data: bytes) -> SpoolEntry:
        upload = CodedUpload(spec(), SpoolKey(SpoolRun(RUN), ROOT, 1, 0), self.base, self.expected)
        upload.accept(manifest)(0, data)
        return upload.enter(self.spool, self.blobs, "worker", 5)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def whole(frozen: Frozen) -> bytes:
    return b"".join(bytes(buffer) for buffer in frozen.buffers)


def test_an_update_arrives_as_state_plus_what_was_decoded(place: Place) -> None:
    frozen = update(torch.full((3, 7), 127.0), **{"model/mean": torch.full((3,), 9.0)})
    assert frozen is not None
    assert frozen.manifest.codec == "int8"
    assert [each.name for each in frozen.manifest.tensors] == [
        *("model/count", "model/mean", "payload")
    ]
    entry = place.enter(frozen.manifest, whole(frozen))
    stored = entry.path.read_bytes()[entry.data_start :]
    assert np.frombuffer(stored[:8], "<i8").tolist() == [4]
    weight = np.frombuffer(stored[8:92], "<f4")
    assert weight.tolist() == (STATE["model/weight"].reshape(-1) + 127).tolist()
    assert np.frombuffer(stored[92:], "<f4").tolist() == [9.0] * 3


def test_a_move_that_is_not_finite_is_sent_as_it_is() -> None:
    assert update(torch.full((3, 7), float("inf"))) is None


def test_what_cannot_be_right_is_rejected_with_the_reason(place: Place) -> None:
    frozen = update(torch.ones(3, 7))
    assert frozen is not None
    manifest, data = frozen.manifest, whole(frozen)
    short = build_manifest([("payload", "uint8", (9,))], Purpose.UPDATE, codec="int8")
    foreign = build_manifest([("model/other", "float32", (3,))], Purpose.UPDATE, codec="int8")
    large = replace(manifest, total_bytes=10_000)
    for wrong, content, reason in (
        (short, data[-9:], "no payload, or one that cannot hold .*model/count"),
        (foreign, bytes(12), "no tensor of the model"),
        (large, data, "10000 bytes for a model of 104"),
        (replace(manifest, codec=""), data, "expected"),
    ):
        with pytest.raises(UpdateRejectedError, match=reason):
            place.enter(wrong, content)

    # A scale that makes a parameter infinite.
    spoiled = bytearray(data)
    spoiled[-25:-21] = np.array([3e38], np.float32).tobytes()
    with pytest.raises(UpdateRejectedError, match="values of 'model/weight' are not finite"):
        place.enter(manifest, bytes(spoiled))
    assert place.spool.entry(SpoolKey(SpoolRun(RUN), ROOT, 1, 0)) is None


def test_a_parameter_that_cannot_be_decoded_leaves_nothing_of_those_before_it(
    tmp_path: Path,
) -> None:
    """They are decoded one after the other, and are in the spool by then."""
    named = [("model/a", "float32", (8,)), ("model/b", "float32", (8,))]
    expected = build_manifest(named, Purpose.STATE)
    blobs, spool = DirectoryBlobs(tmp_path / "blobs"), Spool(tmp_path / "spool", quota_bytes=9999)
    header = header_bytes(expected)
    writer = blobs.writer(len(header) + expected.total_bytes)
    writer.write(header + bytes(64))
    key, base = SpoolKey(SpoolRun(RUN), ROOT, 1, 0), writer.commit()
    payload = np.frombuffer(np.float32(1.0).tobytes() + b"\x11\x11", np.uint8)
    good = np.tile(payload, 2)
    bad = good.copy()
    bad[-1] = 0xFF
    wire = build_manifest([("payload", "uint8", (good.size,))], Purpose.UPDATE, codec="ternary")

    def enter(data: np.ndarray[Any, Any]) -> SpoolEntry:
        upload = CodedUpload(spec("ternary"), key, base, expected)
        upload.accept(wire)(0, data.tobytes())
        return upload.enter(spool, blobs, "worker", 5)

    with pytest.raises(UpdateRejectedError, match="code 11"):
        enter(bad)
    assert spool.used_bytes == 0
    assert not [path for path in (tmp_path / "spool").rglob("*") if path.is_file()]
    entry = enter(good)
    stored = np.frombuffer(entry.path.read_bytes()[entry.data_start :], "<f4")
    assert stored.tolist() == [1.0, 0.0, 1.0, 0.0] * 4
