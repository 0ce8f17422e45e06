"""What the coordinator takes of an update that is offered with its result."""

import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, LimitError
from stratagem.common.tensors.local_files import MemoryCopy, place
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, Limits, Purpose, to_proto
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.coordinator.effects.train_client import OfferedUpdate, offered_update
from stratagem.coordinator.runtime.links import WorkerLink
from stratagem.v1 import worker_pb2

WEIGHT = torch.arange(7.0)


class Link:
    """To a worker on this machine."""

    place = place()

    def leave(self) -> None:
        self.place = ""


def taken(
    result: worker_pb2.ClientRoundResult, limits: Limits = DEFAULT_LIMITS, link: Any = None
) -> OfferedUpdate | None:
    return offered_update(cast(WorkerLink, link or Link()), result, limits, ("",))


def offer(copy: MemoryCopy, purpose: Purpose = Purpose.UPDATE) -> worker_pb2.ClientRoundResult:
    manifest, _ = manifest_of({"weight": WEIGHT}, purpose)
    return worker_pb2.ClientRoundResult(
        manifest=to_proto(manifest).SerializeToString(), file=copy.offer()
    )


def copy_of_weight() -> MemoryCopy:
    return MemoryCopy([WEIGHT.numpy().data])


def test_an_offered_update_is_read_with_its_manifest() -> None:
    copy = copy_of_weight()
    update = taken(offer(copy))
    assert update is not None
    data = b"".join(map(bytes, update.pieces))
    assert np.frombuffer(data, np.float32).tolist() == WEIGHT.tolist()
    assert [spec.name for spec in update.manifest.tensors] == ["weight"]


def test_manifests_that_break_a_rule_are_refused() -> None:
    copy = copy_of_weight()
    with pytest.raises(InvalidInputError):
        taken(offer(copy, Purpose.STATE))
    with pytest.raises(LimitError):
        taken(offer(copy), Limits(max_total_bytes=27))
    broken = offer(copy)
    broken.manifest = b"\xff"
    with pytest.raises(InvalidInputError, match="manifest"):
        taken(broken)


def test_an_update_that_cannot_be_read_here_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(worker_pb2.ClientRoundResult()) is None
    copy = copy_of_weight()
    gone = offer(copy)
    copy.close()
    assert taken(gone) is None

    def forbidden(*_: object, **__: object) -> int:
        raise PermissionError("the kernel does not allow it")

    monkeypatch.setattr(os, "open", forbidden)
    copy = copy_of_weight()
    result = offer(copy)
    link = Link()
    assert taken(result, link=link) is None
    assert link.place == "", "nor is one asked for again"
    monkeypatch.undo()
    assert taken(result, link=link) is None
    assert taken(result) is not None


def test_an_update_that_is_refused_before_it_is_read_leaves_nothing_open() -> None:
    copy = copy_of_weight()
    name = copy.offer().name
    assert num_open(name) == 1
    for _ in range(3):
        assert taken(offer(copy)) is not None
    gc.collect()
    assert num_open(name) == 1


def num_open(name: str) -> int:
    """How many descriptors of this process are of a copy; those of others come and go."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += name in os.readlink(link)
    return found
