"""What is read of a blob is checked, always: disks change bits under unchanged time stamps."""

import asyncio
import os
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.common.base.errors import IntegrityError, UnavailableError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import header_bytes, header_of
from stratagem.common.tensors.manifest import Manifest, Purpose, TensorSpec
from stratagem.common.tensors.stream import CHUNK_BYTES, crc32c, frame, has_crc, piece_bytes
from stratagem.coordinator.runtime.links import SharedFrames
from stratagem.coordinator.service.streams import download
from stratagem.coordinator.store.blobs import BlobStore, DamagedBlobError, DirectoryBlobs
from stratagem.coordinator.store.files import Sums
from stratagem.v1.coordinator_pb2 import DownloadStateResponse
from tests.coordinator.store.places import Bucket, put, read
from tests.coordinator.updates.updates import flip_bit

SIZE = CHUNK_BYTES + 4096
DATA = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8).tobytes()
SPEC = TensorSpec("weight", "uint8", (SIZE,), 0, SIZE)
MANIFEST = Manifest((SPEC,), SIZE, Purpose.STATE)
HEADER = header_bytes(MANIFEST)
CONTENT = HEADER + DATA
PIECE = piece_bytes(len(CONTENT))
"""Of which a checksum is kept."""
HEAD = len(HEADER)
PLACES = (12, HEAD, HEAD + PIECE - 1, HEAD + PIECE, len(CONTENT) - 1)
"""In the header, the first byte, the end of a chunk, the second chunk, the last byte."""


def rot(path: Path, at: int) -> None:
    """Change one bit as a disk would: the file's size and times stay."""
    before = path.stat()
    flip_bit(path, at)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def store_with(folder: Path, content: bytes = CONTENT) -> tuple[DirectoryBlobs, Digest]:
    store = DirectoryBlobs(folder)
    return store, put(store, content, step=300_000)


def streamed(store: BlobStore, digest: Digest, offset: int = 0) -> bytes:
    """As a client would receive it."""

    async def receive() -> bytes:
        frames = download(store, digest, offset, DownloadStateResponse)
        got: list[Any] = [frame async for frame in frames]
        return carried((each for each in got[1:] if isinstance(each, bytes)), offset)

    return asyncio.run(receive())


def carried(frames: Iterable[bytes], offset: int = 0) -> bytes:
    """What frames carry, of which each must begin where the one before it ends."""
    data = b""
    for each in frames:
        chunk = DownloadStateResponse.FromString(each).chunk
        assert chunk.offset == offset + len(data)
        assert 0 < len(chunk.data) <= CHUNK_BYTES
        assert chunk.crc32c == crc32c(chunk.data)
        data += chunk.data
    return data


@pytest.mark.parametrize("is_known", [True, False], ids=["written here", "verified"])
def test_a_bit_that_changes_later_is_found_by_whoever_reads_it(
    tmp_path: Path, is_known: bool
) -> None:
    store, digest = store_with(tmp_path)
    for at in PLACES:
        if not is_known:  # as the next coordinator finds it
            store = DirectoryBlobs(tmp_path)
            assert read(store, digest) == CONTENT
        rot(store.path(digest), at)
        changed = f"blob {digest} has changed where it is stored"
        with pytest.raises(UnavailableError, match=changed):
            read(store, digest)
        with pytest.raises(DamagedBlobError):
            store.open(digest)
        put(store, CONTENT)
        assert read(store, digest) == CONTENT


def test_no_stream_gives_it_to_anybody(tmp_path: Path) -> None:
    for at in PLACES:
        store, digest = store_with(tmp_path)
        assert streamed(store, digest) == DATA
        rot(store.path(digest), at)
        with pytest.raises(UnavailableError, match="has changed"):
            streamed(store, digest)
        with pytest.raises(IntegrityError):
            streamed(store, digest)


def test_no_push_to_workers_gives_it_to_anybody(tmp_path: Path) -> None:
    store, digest = store_with(tmp_path)
    with store.open(digest) as file:
        first, second = (
            SharedFrames(file.source(), SIZE, file.check, file.offer) for _ in range(2)
        )
    for offset in (0, 5, PIECE, PIECE + 5):  # a slow receiver goes on inside a chunk
        assert carried(first(offset), offset) == DATA[offset:]
    rot(store.path(digest), HEAD)  # under a reader that has it open
    with pytest.raises(UnavailableError, match="has changed"):
        list(second(0))


def test_a_stream_goes_on_from_any_offset(tmp_path: Path) -> None:
    for offset in (1, PIECE - 1, PIECE, PIECE + 5, SIZE - 1):
        store, digest = store_with(tmp_path)
        assert streamed(store, digest, offset) == DATA[offset:]
        rot(store.path(digest), len(HEADER) + offset - offset % PIECE)
        with pytest.raises(UnavailableError, match="has changed"):
            streamed(store, digest, offset)


def test_windows_are_those_of_the_content(tmp_path: Path) -> None:
    store, digest = store_with(tmp_path)
    drawn = random.Random(3)
    with store.open(digest) as file:
        manifest, start = header_of(file, digest)
        assert (replace(manifest, digest=""), start) == (MANIFEST, HEAD)
        for _ in range(100):
            begin = drawn.randrange(len(CONTENT))
            size = drawn.choice([0, 1, 7, 4096, CHUNK_BYTES, SIZE])
            window = bytearray(min(size, len(CONTENT) - begin))
            file.read_into(memoryview(window), begin)
            assert window == CONTENT[begin : begin + size]
            file.seek(begin)
            assert file.read(size) == window
        assert file.read(0) == b""


def test_what_is_no_state_is_checked_too(tmp_path: Path) -> None:
    for content in (b"", b"abc", b"12345678", b"\xff" * 5000, HEADER):
        store, digest = store_with(tmp_path, content)
        assert read(store, digest) == content
        assert read(DirectoryBlobs(tmp_path), digest) == content
        if content:
            rot(store.path(digest), len(content) - 1)
            with pytest.raises(UnavailableError):
                read(store, digest)


def test_a_copy_of_an_object_that_rots_is_fetched_again(memory: Bucket) -> None:
    cache = memory.cache()
    store = memory.blobs(cache=cache)
    digest = put(store, CONTENT, step=300_000)
    for at in PLACES:
        assert read(store, digest) == CONTENT
        rot(cache._copies.path(digest), at)
        with pytest.raises(UnavailableError, match="has changed"):
            read(store, digest)
    assert read(store, digest) == CONTENT


def test_checksums_do_not_depend_on_how_the_bytes_came() -> None:
    drawn = random.Random(4)
    whole = Sums(len(CONTENT))
    whole.add(CONTENT)
    for _ in range(5):
        pieces, at = Sums(len(CONTENT)), 0
        while at < len(CONTENT):
            size = drawn.choice([1, 3, 5, 1000, 70_000, CHUNK_BYTES])
            pieces.add(memoryview(CONTENT)[at : at + size])
            at += size
        assert pieces.data_bytes == whole.data_bytes == SIZE
        assert [pieces.of_chunk(n) for n in range(5)] == [whole.of_chunk(n) for n in range(5)]
        assert pieces.is_head(HEADER)


def test_a_frame_says_its_checksum_also_when_it_is_zero() -> None:
    data = b"x" * 100_000
    assert has_crc(frame(7, data), 7, len(data), crc32c(data))
    assert not has_crc(frame(7, data), 7, len(data), crc32c(data) ^ 1)
    assert not has_crc(frame(7, data), 7, len(data), 0)
    for nothing in (b"\xab\x9b\xe0\x9b", bytes(100_000) + b"\x96\x14\x18~"):
        assert crc32c(nothing) == 0
        assert has_crc(frame(0, nothing), 0, len(nothing), 0)
        assert not has_crc(frame(0, nothing), 0, len(nothing), 1)
