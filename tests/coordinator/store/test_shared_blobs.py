"""Blobs in an object store: who may delete what, the local copies, and troubles of the store."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import obstore
import pytest

from stratagem.common.base.errors import IntegrityError, NotFoundError, UnavailableError
from stratagem.coordinator.store import blobs as directory_blobs
from stratagem.coordinator.store import bucket as object_store
from stratagem.coordinator.store import files
from stratagem.coordinator.store import shared_blobs as cache_module
from stratagem.coordinator.store.files import NoSpaceError
from stratagem.coordinator.store.shared_blobs import BlobCache, default_limit_bytes, own_pieces
from stratagem.coordinator.updates.spool import Spool
from tests.coordinator.store.places import CONTENT, MIB, Bucket, digest_of, put, read
from tests.coordinator.store.troubled import FORBIDDEN, HALF, UNAVAILABLE, troubled
from tests.coordinator.updates.updates import MIXED, OF_RUN, accept, data_of, flip_bit, manifest_of
from tests.programs import run

WRITE = """
from stratagem.coordinator.store.shared_blobs import SharedBlobs
from stratagem.coordinator.store.shared_blobs import BlobCache
from stratagem.coordinator.store.bucket import open_s3
cache = BlobCache(Path(sys.argv[2]), 1 << 30)
store = SharedBlobs(open_s3(sys.argv[1], os.environ), cache, 1)
writer = store.writer(17 << 20)  # three parts of an upload
for _ in range(17):
    writer.write(bytes(1 << 20))
writer.commit()
"""


# ---- two coordinators, of which one does not know that it leads no more ----


def test_a_coordinator_deletes_nothing_that_a_later_one_has_written(memory: Bucket) -> None:
    """And nothing that is none of ours."""
    obstore.put(memory.objects()._store, "blobs/README.txt", b"hands off")
    old, new = memory.blobs(), memory.blobs()
    digest = put(old, CONTENT)
    put(new, CONTENT)  # the same bits again, as after each crash
    other = put(new, b"new")
    assert old.collect((), grace_s=0) == [digest]
    assert read(memory.blobs(), digest) == CONTENT
    assert read(memory.blobs(), other) == b"new"
    memory.blobs().collect((), grace_s=0)
    assert memory.names() == ["blobs/README.txt"]


def test_a_delete_that_is_late_misses_what_was_written_meanwhile(
    memory: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old coordinator is frozen between listing and deleting, at the worst moment."""
    old = memory.blobs()
    digest = put(old, CONTENT)
    new = memory.blobs()
    delete = object_store.Objects.delete

    def frozen(self: object_store.Objects, names: object) -> None:
        monkeypatch.setattr(object_store.Objects, "delete", delete)
        assert new.keep(digest)
        delete(self, names)  # type: ignore[arg-type]

    monkeypatch.setattr(object_store.Objects, "delete", frozen)
    assert old.collect((), grace_s=0) == [digest]
    assert read(memory.blobs(), digest) == CONTENT
    assert new.collect((), grace_s=60) == []


def test_of_equal_objects_one_that_is_whole_is_read_and_the_newest_stays(memory: Bucket) -> None:
    digest = put(memory.blobs(), CONTENT)
    put(memory.blobs(), CONTENT)
    for name in memory.names()[1:]:
        obstore.put(memory.objects()._store, name, b"damaged")
    assert read(memory.blobs(), digest) == CONTENT
    store = memory.blobs()
    put(store, CONTENT)
    assert len(memory.names()) == 3
    assert store.collect({digest}, grace_s=0) == []
    (name,) = memory.names()
    assert object_store.term_of(name) == memory.num_coordinators
    assert read(memory.blobs(), digest) == CONTENT
    memory.damage(digest, 3)
    assert not memory.blobs().keep(digest)  # then it is uploaded again


# ---- local copies ----


def copies(cache_root: Path) -> set[str]:
    return {path.stem for path in cache_root.glob("??/*.safetensors")}


@pytest.mark.parametrize("ahead_ns", [0, 86400 * 10**9], ids=["of the disk", "a day ahead of it"])
def test_the_copy_that_was_used_least_recently_goes_first(
    memory: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_ns: int
) -> None:
    """By one clock, where the clock of the disk is another one."""
    clock = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: clock() + ahead_ns)
    cache = BlobCache(tmp_path / "cache", 250)
    store = memory.blobs(cache=cache)
    first, second, third = (put(store, bytes([n]) * 100) for n in range(3))
    assert copies(tmp_path / "cache") == {second, third}
    with store.open(second) as held:
        read(store, third)
        read(store, first)  # fetched again
        assert copies(tmp_path / "cache") == {third, first}
        assert held.read() == bytes([1]) * 100
    # The order outlives the process, and what crashed meanwhile leaves nothing.
    (tmp_path / "cache" / "tmp" / "0123456789abcdef").write_bytes(b"left behind")
    again = memory.blobs(cache=BlobCache(tmp_path / "cache", 150))
    assert copies(tmp_path / "cache") == {first}
    assert not list((tmp_path / "cache" / "tmp").iterdir())
    assert read(again, third) == bytes([2]) * 100
    large = put(again, CONTENT)  # than the limit: it has a copy of its own
    assert copies(tmp_path / "cache") == {large}
    assert read(again, first) == bytes(100)


class SmallDisk:
    """Stands in for `os` where files are written: all below a folder has so many bytes of room."""

    def __init__(self, root: Path, room_bytes: int) -> None:
        self._root, self._room_bytes = root, room_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: memoryview) -> int:
        used = sum(path.stat().st_size for path in self._root.rglob("*") if path.is_file())
        if used + len(data) > self._room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)


def test_copies_make_room_on_a_full_disk(
    memory: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For states, for parts of them, and for updates on the same disk."""
    disk = tmp_path / "disk"
    store = memory.blobs(cache=BlobCache(disk / "cache", MIB))
    spool = Spool(disk / "spool", quota_bytes=MIB, make_room=store.make_room)
    monkeypatch.setattr(files, "os", SmallDisk(disk, 2500))
    digests = [put(store, bytes([number]) * 1000) for number in range(5)]
    assert copies(disk / "cache") == set(digests[-2:])
    assert [read(store, each) for each in digests] == [bytes([n]) * 1000 for n in range(5)]
    scratch = store.scratch()
    scratch.write(bytes(1600))
    assert len(copies(disk / "cache")) == 0
    scratch.close()
    put(store, CONTENT[:2000])
    update = manifest_of(MIXED)
    accepted = accept(spool, 0, update, data_of(update, 1))
    assert accepted.path.stat().st_size > 500
    assert not copies(disk / "cache"), "no copy is worth an update"
    spool.delete_run(OF_RUN)
    with pytest.raises(NoSpaceError, match="the coordinator's disk is full"):
        put(store, bytes(3000))
    assert not list((disk / "cache" / "tmp").iterdir())
    put(store, b"the next one")


def test_a_state_counts_though_there_is_no_room_for_the_name_of_its_copy(
    memory: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = memory.blobs(cache=BlobCache(tmp_path / "cache", MIB))

    def refuse(_path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(directory_blobs, "make_folder", refuse)
        digest = put(store, CONTENT)
    assert store.exists(digest)
    assert not list((tmp_path / "cache" / "tmp").iterdir())
    assert read(store, digest) == CONTENT


def test_copies_take_half_of_a_small_disk_and_leave_some_room(
    memory: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlobCache(tmp_path / "cache", MIB)
    store = memory.blobs(cache=cache)
    digests = [put(store, bytes([number]) * 100) for number in range(3)]
    found = os.statvfs(tmp_path)
    total_bytes = found.f_blocks * found.f_frsize
    assert default_limit_bytes(tmp_path) == min(32 << 30, total_bytes // 2)
    store.keep_room()
    before = copies(tmp_path / "cache")
    monkeypatch.setattr(cache_module, "free_bytes", lambda _: 0)
    store.keep_room()
    assert copies(tmp_path / "cache") == {digests[-1]} <= before


def test_a_damaged_copy_is_fetched_again(memory: Bucket, tmp_path: Path) -> None:
    digest = put(memory.blobs(cache=BlobCache(tmp_path / "cache", MIB)), CONTENT)
    flip_bit(next((tmp_path / "cache").glob("??/*")), 77)
    store = memory.blobs(cache=BlobCache(tmp_path / "cache", MIB))
    assert read(store, digest) == CONTENT
    flip_bit(next((tmp_path / "cache").glob("??/*")), 77)  # also of a copy that was verified
    assert read(store, digest) == CONTENT


def test_readers_of_one_blob_share_one_transfer(
    memory: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = put(memory.blobs(), CONTENT)
    store, num_reads, found = memory.blobs(), [], []
    reading = object_store.Objects.read
    all_ask = threading.Barrier(4)

    def counted(self: object_store.Objects, each: object_store.StoredObject) -> object:
        num_reads.append(each)
        return reading(self, each)

    def ask() -> None:
        all_ask.wait()
        found.append(read(store, digest))

    monkeypatch.setattr(object_store.Objects, "read", counted)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert len(num_reads) == 1


# ---- crashes ----


@pytest.mark.parametrize(
    ("failpoint", "is_there"),
    [("coordinator.objects.after_part", False), ("coordinator.objects.after_put", True)],
)
def test_a_writer_that_is_killed_leaves_all_or_nothing(
    bucket: Bucket, tmp_path: Path, failpoint: str, is_there: bool
) -> None:
    (tmp_path / failpoint).write_text("1")  # let the trial, or the first part, pass
    status, _ = run(WRITE, bucket.url, tmp_path / "cache", failpoints=tmp_path)
    assert status == 137
    digest = digest_of(bytes(17 * MIB))
    store = bucket.blobs()
    assert store.exists(digest) == is_there
    if is_there:
        assert read(store, digest) == bytes(17 * MIB)
    assert bool(bucket.names()) == is_there
    assert BlobCache(tmp_path / "cache", MIB).open(digest) is None
    assert not list((tmp_path / "cache" / "tmp").iterdir())


# ---- an object store in trouble ----


def test_what_passes_is_tried_again_and_what_does_not_is_not_acknowledged(
    bucket: Bucket, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with troubled(s3_endpoint) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        store = bucket.blobs()
        server.troubles["PUT"] = [UNAVAILABLE, UNAVAILABLE]
        digest = put(store, CONTENT)
        assert server.troubles["PUT"] == []
        server.troubles["GET"] = [UNAVAILABLE, 200, UNAVAILABLE, HALF, HALF]
        assert read(bucket.blobs(), digest) == CONTENT
        assert server.troubles["GET"] == []
        fresh = bucket.blobs()
        server.always = FORBIDDEN
        for act in (
            lambda: put(store, b"new"),
            lambda: fresh.open(digest),
            lambda: fresh.exists(digest),
            lambda: store.collect((), grace_s=0),
        ):
            with pytest.raises(UnavailableError, match=r"object store: .*403"):
                act()
        server.always = None
        assert not store.exists(digest_of(b"new"))
        assert read(fresh, digest) == CONTENT


def test_an_object_that_vanishes_between_listing_and_reading_is_not_found(
    memory: Bucket, tmp_path: Path
) -> None:
    digest = put(memory.blobs(), CONTENT)
    store = memory.blobs()
    (name,) = memory.names()
    with pytest.raises(NotFoundError):
        list(memory.objects().read(object_store.StoredObject(f"{name}x", 5)))
    for _ in range(2):
        memory.objects().delete([name])
    with pytest.raises(NotFoundError):
        store.open(digest)
    (tmp_path / "x").write_bytes(b"12345")  # nor does a file shrink unnoticed under its upload
    with (tmp_path / "x").open("rb") as file, pytest.raises(IntegrityError, match="5 of 9 bytes"):
        list(own_pieces(file.fileno(), 9))


def test_a_reader_finds_the_object_that_took_the_place_of_those_it_had_listed(
    memory: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = put(memory.blobs(), CONTENT)
    reader = memory.blobs()
    listing = object_store.Objects.list

    def list_then_replace(
        self: object_store.Objects, folder: str
    ) -> list[object_store.StoredObject]:
        found = listing(self, folder)
        monkeypatch.setattr(object_store.Objects, "list", listing)
        new = memory.blobs()
        put(new, CONTENT)
        new.collect({digest}, grace_s=0)
        return found

    monkeypatch.setattr(object_store.Objects, "list", list_then_replace)
    assert read(reader, digest) == CONTENT
