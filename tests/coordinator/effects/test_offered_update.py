"""What the coordinator takes of an update that is offered with its result."""

import os

import numpy as np
import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, LimitError
from stratagem.common.tensors import open_files
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, Limits, Purpose, to_proto
from stratagem.common.tensors.open_files import MemoryCopy, place
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.coordinator.effects.federated.offered_update import offered_update
from stratagem.v1 import worker_pb2

WEIGHT = torch.arange(7.0)


def offer(copy: MemoryCopy, purpose: Purpose = Purpose.UPDATE) -> worker_pb2.ClientRoundResult:
    manifest, _ = manifest_of({"weight": WEIGHT}, purpose)
    return worker_pb2.ClientRoundResult(
        manifest=to_proto(manifest).SerializeToString(), file=copy.offer()
    )


def copy_of_weight() -> MemoryCopy:
    return MemoryCopy([WEIGHT.numpy().data])


def test_an_offered_update_is_read_with_its_manifest() -> None:
    copy = copy_of_weight()
    update = offered_update(offer(copy), DEFAULT_LIMITS, ("",))
    assert update is not None
    data = b"".join(map(bytes, update.pieces))
    assert np.frombuffer(data, np.float32).tolist() == WEIGHT.tolist()
    assert [spec.name for spec in update.manifest.tensors] == ["weight"]


def test_manifests_that_break_a_rule_are_refused() -> None:
    copy = copy_of_weight()
    with pytest.raises(InvalidInputError):
        offered_update(offer(copy, Purpose.STATE), DEFAULT_LIMITS, ("",))
    with pytest.raises(LimitError):
        offered_update(offer(copy), Limits(max_total_bytes=27), ("",))
    broken = offer(copy)
    broken.manifest = b"\xff"
    with pytest.raises(InvalidInputError, match="manifest"):
        offered_update(broken, DEFAULT_LIMITS, ("",))


def test_an_update_that_cannot_be_read_here_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered_update(worker_pb2.ClientRoundResult(), DEFAULT_LIMITS, ("",)) is None
    copy = copy_of_weight()
    gone = offer(copy)
    copy.close()
    assert offered_update(gone, DEFAULT_LIMITS, ("",)) is None
    monkeypatch.setattr(open_files._Place, "name", place())  # put back behind the test

    def forbidden(*_: object, **__: object) -> int:
        raise PermissionError("the kernel does not allow it")

    monkeypatch.setattr(os, "open", forbidden)
    copy = copy_of_weight()
    result = offer(copy)
    assert offered_update(result, DEFAULT_LIMITS, ("",)) is None
    assert place() == "", "nor is one asked for again"
