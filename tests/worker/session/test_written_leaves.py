"""Members write their shares of a snapshot, and together each leaf once."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from stratagem.common.base.errors import InvalidInputError, NotFoundError, UnavailableError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import (
    LeafList,
    StateFolder,
    leaves_of,
    list_bytes,
    state_digest,
)
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, from_proto
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host.blobs import ReceivedBlobs
from stratagem.worker.host.states import DirectStates
from stratagem.worker.session.leaves import FolderSink, check_header
from stratagem.worker.session.states import Frozen, freeze
from tests.worker.session.piece_server import empty_folder, written

UPLOAD = f"{7:010}-{'a' * 16}"


def state() -> Frozen:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "large": torch.randn(300_001, generator=generator),
        "small": torch.randn(7, 3, generator=generator),
        "none": torch.empty(0, 3),
        "larger": torch.randn(600, 600, generator=generator),
        "count": torch.tensor(3),
    }
    return freeze(tensors, {"step": "3"})


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return empty_folder(tmp_path)


async def write(
    folder: StateFolder,
    frozen: Frozen,
    rank: int = 0,
    num_ranks: int = 1,
    have: Iterable[Digest] = (),
) -> list[pb.WrittenLeaf]:
    header = pb.WriteLeavesHeader(store_id="ours", upload=UPLOAD, rank=rank, num_ranks=num_ranks)
    header.have.extend(bytes.fromhex(each) for each in have)
    check_header(header)
    first, *rest = [message async for message in written(folder, frozen, header)]
    assert from_proto(first.manifest) == frozen.manifest
    return sorted((message.leaf for message in rest), key=lambda leaf: leaf.number)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
async def test_shares_make_the_whole(folder: StateFolder, num_ranks: int) -> None:
    frozen = state()
    told = {}
    for rank in range(num_ranks):
        for leaf in await write(folder, frozen, rank, num_ranks):
            assert leaf.number % num_ranks == rank
            assert leaf.written
            told[leaf.number] = Digest(leaf.digest.hex())
    leaves = leaves_of(frozen.manifest)
    assert sorted(told) == list(range(len(leaves))) == [0, 1, 2]
    digests = tuple(told[number] for number in range(len(leaves)))
    data = b"".join(frozen.buffers)
    listed = LeafList(frozen.manifest, b"", digests)
    assert b"".join(folder.read_state(listed)) == data
    named = hashlib.sha256(list_bytes(frozen.manifest, digests)).hexdigest()
    assert named != state_digest(frozen.manifest, [data])


async def test_what_is_there_is_not_written_and_equal_leaves_once(folder: StateFolder) -> None:
    frozen = state()
    (first, *others) = await write(folder, frozen)
    known = Digest(first.digest.hex())
    for path in folder.leaves.glob("??/*"):
        path.unlink()
    again = await write(folder, frozen, have=[known])
    assert [leaf.written for leaf in again] == [False, True, True]
    assert [leaf.digest for leaf in again] == [first.digest, *(each.digest for each in others)]
    assert folder.copies(known) == []
    before = len(list(folder.leaves.glob("??/*")))
    told = await write(folder, freeze({name: torch.zeros(300_000) for name in "abcd"}, {}))
    assert len({leaf.digest for leaf in told}) == 1
    assert len(list(folder.leaves.glob("??/*"))) == before + 1
    folder.temporary.rmdir()
    with pytest.raises(UnavailableError, match="cannot be written"):
        await write(folder, state())


async def test_nothing_reads_the_snapshot_once_the_call_has_ended(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        begun.set()
        may_end.wait()
        ended.set()

    monkeypatch.setattr(folder, "write_leaf", slow)

    async def call() -> None:
        header = pb.WriteLeavesHeader(store_id="ours", upload=UPLOAD, num_ranks=1)
        async with aclosing(written(folder, state(), header)) as messages:
            async for _ in messages:
                pass

    task = asyncio.create_task(call())
    await asyncio.to_thread(begun.wait)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_a_request_that_makes_no_sense_and_another_folder_are_refused(
    folder: StateFolder, tmp_path: Path
) -> None:
    for upload, rank, num_ranks, said in (
        ("../../etc/passwd", 0, 1, "upload: '../../etc/passwd' is not TERM-TOKEN"),
        (UPLOAD, 0, 0, "rank: 0 is not below num_ranks, 0"),
        (UPLOAD, 2, 2, "rank: 2 is not below num_ranks, 2"),
    ):
        header = pb.WriteLeavesHeader(upload=upload, rank=rank, num_ranks=num_ranks)
        with pytest.raises(InvalidInputError, match=said):
            check_header(header)
    header = pb.WriteLeavesHeader(store_id="another")
    for other in (folder, StateFolder(tmp_path / "elsewhere")):
        with pytest.raises(NotFoundError, match="is not the coordinator's folder"):
            FolderSink(other, header)
    with pytest.raises(NotFoundError, match="--state-folder"):
        FolderSink(None, header)


async def listed(folder: StateFolder, frozen: Frozen) -> Digest:
    leaves = await write(folder, frozen)
    content = list_bytes(frozen.manifest, [Digest(leaf.digest.hex()) for leaf in leaves])
    digest = Digest(hashlib.sha256(content).hexdigest())
    path = folder.lists / digest[:2] / f"{digest}.leaves"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return digest


@pytest.mark.parametrize("in_memory", [True, False])
async def test_a_state_is_read_without_the_coordinator(
    folder: StateFolder, tmp_path: Path, in_memory: bool
) -> None:
    frozen = state()
    digest = await listed(folder, frozen)
    states = DirectStates(folder, DEFAULT_LIMITS)
    blobs = ReceivedBlobs(tmp_path / "data", 2**30 if in_memory else 0)
    read = await asyncio.gather(*(states.read(blobs, "run", digest, 1) for _ in range(3)))
    assert all(read), "those who ask at once share the reading"
    blob = blobs.find("run", digest)
    assert blob is not None
    tensors, metadata = blob.load()
    assert metadata == {"step": "3"}
    found = [tensors[spec.name].numpy().tobytes() for spec in frozen.manifest.stored()]
    assert found == [bytes(buffer) for buffer in frozen.buffers]
    assert not await states.read(blobs, "run", "0" * 64, 1), "no such state"
    blobs.clear()


async def test_what_cannot_be_read_comes_otherwise(folder: StateFolder, tmp_path: Path) -> None:
    digest = await listed(folder, state())
    for path in folder.leaves.glob("??/*"):
        path.write_bytes(bytes(path.stat().st_size))
    states, blobs = DirectStates(folder, DEFAULT_LIMITS), ReceivedBlobs(None, 2**30)
    assert not await states.read(blobs, "run", digest, 1)
    assert blobs.find("run", digest) is None
    # And may come as a stream then.
    manifest = state().manifest
    upload = blobs.open_upload("run", digest, manifest, 1)
    assert upload.writer.received == 0
    assert not await states.read(blobs, "run", digest, 1), "it is coming"
    assert upload.is_open
