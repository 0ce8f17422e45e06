"""A snapshot of which a part is sent becomes the blob that all of its bytes would have made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.common.base.errors import (
    ConflictError,
    IntegrityError,
    InvalidInputError,
    UnavailableError,
)
from stratagem.common.base.ids import Digest, Incarnation, RunId, WorkerId
from stratagem.common.tensors.files import blob_digest, header_bytes, header_of
from stratagem.common.tensors.manifest import Limits, Manifest, to_proto
from stratagem.common.tensors.stream import crc32c
from stratagem.coordinator.core.facts import ROOT, Member
from stratagem.coordinator.effects.snapshot import BaseBlob, SnapshotIntake, pull_snapshot
from stratagem.coordinator.runtime.links import WorkerSession
from stratagem.coordinator.store.blobs import DirectoryBlobs, file_writer
from stratagem.v1 import tensor_pb2, worker_pb2
from stratagem.worker.session.states import Frozen, SentState, freeze, without_same


def state(step: int, **changed: Tensor) -> Frozen:
    """A layer that trains between two that do not; more than a block, and none."""
    tensors = {
        "first": torch.arange(300_000, dtype=torch.float32),
        "trained": torch.full((7, 3), float(step)),
        "none": torch.empty(0, 3),
        "last": torch.arange(601, dtype=torch.int16),
    }
    return freeze({**tensors, **changed}, {"step": str(step)})


def whole(frozen: Frozen) -> SentState:
    return SentState(frozen.manifest, frozen.buffers)


def first_message(sent: SentState, name: str = "n") -> worker_pb2.GetStateResponse:
    return worker_pb2.GetStateResponse(name=name, same=sent.same)


@contextmanager
def opened(blobs: DirectoryBlobs, older: Frozen, digest: Digest) -> Iterator[BaseBlob]:
    start = len(header_bytes(older.manifest))
    with blobs.open(digest) as file:
        yield BaseBlob(older.name, file, start, older.manifest.total_bytes)


def taken_in(
    blobs: DirectoryBlobs,
    frozen: Frozen,
    sent: SentState,
    base: BaseBlob | None = None,
    cut_at: int = 65536,
) -> Digest:
    """In pieces of so many bytes; none at the end of all."""
    intake = SnapshotIntake(partial(file_writer, blobs), base)
    assert intake.size_of(first_message(sent), frozen.manifest) == sent.num_bytes
    write = intake.accept(frozen.manifest)
    data = b"".join(sent.buffers)
    assert len(data) == sent.num_bytes
    for start in range(0, len(data), cut_at):
        write(data[start : start + cut_at])
    write(b"")
    return intake.commit()


@pytest.mark.parametrize(
    ("changed", "num_bytes", "cut_at"),
    [
        ({}, 84, 1),
        ({"last": torch.zeros(601, dtype=torch.int16)}, 84 + 1202, 13),
        ({"trained": torch.full((7, 3), 1.0)}, 0, 4096),
        ({"more": torch.ones(5), "trained": torch.ones(8, 3)}, 20 + 96, 13),
    ],
)
def test_the_blob_is_the_same(
    tmp_path: Path, changed: dict[str, Tensor], num_bytes: int, cut_at: int
) -> None:
    blobs = DirectoryBlobs(tmp_path / "blobs")
    older, newer = state(1), state(2, **changed)
    before = taken_in(blobs, older, whole(older))
    assert before == blob_digest(older.manifest, older.buffers)
    sent = without_same(newer, older)
    assert sent.num_bytes == num_bytes
    with opened(blobs, older, before) as base:
        digest = taken_in(blobs, newer, sent, base, cut_at)
    assert digest == blob_digest(newer.manifest, newer.buffers)


def test_a_base_that_has_rotted_gives_no_blob(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path / "blobs")
    older, newer = state(1), state(2)
    digest = taken_in(blobs, older, whole(older))
    with opened(blobs, older, digest) as base:
        with blobs.path(digest).open("r+b") as file:
            file.seek(1_000_000)
            file.write(b"\xff\xff")
        intake = SnapshotIntake(partial(file_writer, blobs), base)
        intake.size_of(first_message(without_same(newer, older)), newer.manifest)
        write = intake.accept(newer.manifest)
        with pytest.raises(UnavailableError, match=digest):
            write(b"")
        intake.abort()
    with pytest.raises(IntegrityError, match="is damaged"):
        blobs.open(digest)


def test_what_a_worker_says_of_a_base_is_checked(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path / "blobs")
    older, newer = state(1), state(2)
    sent = without_same(newer, older)
    without_base = SnapshotIntake(partial(file_writer, blobs), None)
    with pytest.raises(InvalidInputError, match="the 0 bytes of the base"):
        without_base.size_of(first_message(sent), newer.manifest)
    digest = taken_in(blobs, older, whole(older))
    with opened(blobs, older, digest) as base:
        intake = SnapshotIntake(partial(file_writer, blobs), base)
        for _ in range(2):  # the stream was resumed
            assert intake.size_of(first_message(sent), newer.manifest) == 84
        for other in (first_message(whole(newer)), first_message(sent, "another")):
            with pytest.raises(ConflictError, match="another part of the snapshot"):
                intake.size_of(other, newer.manifest)
        write = intake.accept(newer.manifest)
        write(b"")
        with pytest.raises(IntegrityError, match="of the announced"):
            intake.commit()


class Answers:
    """A worker's stream: the manifest, then all that it sends in one chunk."""

    def __init__(self, first: worker_pb2.GetStateResponse, frozen: Frozen, sent: SentState) -> None:
        first.manifest.CopyFrom(to_proto(frozen.manifest))
        data = b"".join(sent.buffers)
        chunk = tensor_pb2.Chunk(offset=0, data=data, crc32c=crc32c(data))
        self._messages = iter([first, worker_pb2.GetStateResponse(chunk=chunk)])

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> worker_pb2.GetStateResponse:
        try:
            return next(self._messages)
        except StopIteration:
            raise StopAsyncIteration from None

    def cancel(self) -> None:
        pass


class Worker:
    """Gives its snapshots by number; says of the third that all of it is elsewhere in the base."""

    def __init__(self, *states: Frozen) -> None:
        self.states, self.asked = states, list[tuple[int, str]]()

    def snapshot(self, _at: WorkerSession, number: int, base: str = "") -> Callable[[int], Answers]:
        self.asked.append((number, base))
        frozen = self.states[number]
        older = next((each for each in self.states if each.name == base), None)
        sent = whole(frozen) if older is None else without_same(frozen, older)
        if older is not None and number == 2:
            sent = SentState(frozen.manifest, [], [worker_pb2.SameBytes(size=10**9)])
        return lambda _offset: Answers(first_message(sent, frozen.name), frozen, sent)


async def test_what_cannot_be_had_by_its_changes_is_pulled_whole(tmp_path: Path) -> None:
    member = Member(worker_id=WorkerId("w0"), incarnation=Incarnation("first"))
    at = WorkerSession(member, RunId("run"), ROOT, 1)
    worker = Worker(*(state(step) for step in range(5)))
    blobs = DirectoryBlobs(tmp_path / "blobs")

    async def header(digest: Digest) -> tuple[Manifest, int]:
        with blobs.open(digest) as file:
            return header_of(file, digest)

    env: Any = SimpleNamespace(
        runs=SimpleNamespace(state=None),
        workers=SimpleNamespace(link=lambda _member: worker),
        transfers=SimpleNamespace(
            blobs=blobs, limits=Limits(max_total_bytes=2**30), snapshots={}, header=header
        ),
    )

    async def pulled(number: int, at: WorkerSession = at) -> Digest:
        digest, manifest = await pull_snapshot(env, at, number)
        frozen = worker.states[number]
        assert manifest == frozen.manifest
        assert digest == blob_digest(manifest, frozen.buffers)
        return digest

    names = [each.name for each in worker.states]
    await pulled(0)
    await pulled(1)
    await pulled(2)  # refused by its changes
    digest = await pulled(3)
    assert worker.asked == [(0, ""), (1, names[0]), (2, names[1]), (2, ""), (3, names[2])]
    worker.asked.clear()
    restarted = Member(worker_id=WorkerId("w0"), incarnation=Incarnation("second"))
    await pulled(3, replace(at, member=restarted))  # which has given nothing yet
    blobs.path(digest).unlink()  # as if it had been collected
    await pulled(4, replace(at, member=restarted))
    assert worker.asked == [(3, ""), (4, "")]
