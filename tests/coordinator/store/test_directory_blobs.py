"""What blobs in a folder promise beside the contract."""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from stratagem.common.base.errors import IntegrityError, NotFoundError, StaleError
from stratagem.coordinator.store import blobs, files
from stratagem.coordinator.store.blobs import DirectoryBlobs
from tests.coordinator.store.places import CONTENT, digest_of, put, read
from tests.programs import run

WRITE = """
from stratagem.common.base.errors import UnavailableError
from stratagem.coordinator.store.blobs import DirectoryBlobs
store = DirectoryBlobs(Path(sys.argv[1]))
def put(content):
    writer = store.writer(len(content))
    writer.write(content)
    return writer.commit()
"""


def temporary(root: Path) -> list[Path]:
    return list((root / "tmp").iterdir())


def test_a_blob_is_a_file_for_its_owner_where_it_says(tmp_path: Path) -> None:
    store = DirectoryBlobs(tmp_path / "blobs")
    digest = put(store, CONTENT)
    path = tmp_path / "blobs" / digest[:2] / f"{digest}.safetensors"
    assert store.path(digest) == path
    assert store.location(digest) == str(path.resolve())
    assert path.stat().st_mode & 0o077 == 0
    assert not temporary(tmp_path / "blobs")


@pytest.mark.parametrize("was_read", [True, False])
def test_a_file_of_another_length_is_found_and_writing_again_heals(
    tmp_path: Path, was_read: bool
) -> None:
    for size in (0, 1, len(CONTENT) - 1, len(CONTENT) + 7):
        store = DirectoryBlobs(tmp_path)
        digest = put(store, CONTENT)
        if was_read:  # and verified
            read(store, digest)
        os.truncate(store.path(digest), size)
        with pytest.raises(IntegrityError, match="damaged"):
            store.open(digest)
        put(store, CONTENT)
        assert read(store, digest) == CONTENT


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    store = DirectoryBlobs(tmp_path / "blobs")
    digest = put(store, CONTENT)
    path = store.path(digest)
    secret = tmp_path / "secret"
    path.rename(secret)
    path.symlink_to(secret)
    with pytest.raises(NotFoundError):
        store.open(digest)
    path.unlink()
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / "elsewhere")
    secret.rename(tmp_path / "elsewhere" / path.name)
    assert not store.exists(digest)
    with pytest.raises(NotFoundError):
        store.open(digest)
    with pytest.raises(FileExistsError):
        put(store, CONTENT)


def test_a_new_store_removes_what_dead_writers_left_and_nothing_else(tmp_path: Path) -> None:
    writing = DirectoryBlobs(tmp_path).writer(3)
    run(WRITE + "store.writer(4).write(b'left'); os._exit(0)", tmp_path)
    assert len(temporary(tmp_path)) == 2
    DirectoryBlobs(tmp_path)
    assert len(temporary(tmp_path)) == 1
    writing.write(b"abc")
    assert writing.commit() == digest_of(b"abc")


@pytest.mark.parametrize(
    ("failpoint", "is_there"),
    [("coordinator.blobs.before_rename", False), ("coordinator.blobs.after_rename", True)],
)
def test_a_crash_at_the_rename_leaves_all_or_nothing(
    tmp_path: Path, failpoint: str, is_there: bool
) -> None:
    (tmp_path / failpoint).touch()
    root = tmp_path / "blobs"
    assert run(WRITE + "put(b'content')", root, failpoints=tmp_path)[0] == 137
    store = DirectoryBlobs(root)
    assert store.exists(digest_of(b"content")) == is_there
    assert not temporary(root)
    assert read(store, put(store, b"content")) == b"content"


def test_a_full_disk_is_an_error_that_passes_and_leaves_nothing(tmp_path: Path) -> None:
    code = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
try:
    put(bytes(300_000))
except UnavailableError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert not os.listdir(Path(sys.argv[1]) / "tmp")
print(put(bytes(300_000)))
"""
    _, out = run(WRITE + code, tmp_path)
    assert out.splitlines()[0].startswith("the coordinator's disk is full")
    assert out.splitlines()[1] == digest_of(bytes(300_000))


def test_a_leader_that_was_replaced_collects_nothing_of_its_successor(tmp_path: Path) -> None:
    """And a new one removes what its predecessor has died over while it collected."""
    replaced = DirectoryBlobs(tmp_path)
    put(replaced, b"own")
    discarded = replaced.path(put(replaced, b"discarded"))
    (bin_of_it,) = (tmp_path / "bins").iterdir()
    discarded.rename(bin_of_it / discarded.stem)
    successor = DirectoryBlobs(tmp_path)
    (other,) = (tmp_path / "bins").iterdir()
    assert other != bin_of_it
    assert not list(other.iterdir())
    next_one = put(successor, b"committed by the next")
    with pytest.raises(StaleError, match="opened by another coordinator"):
        replaced.collect(set(), grace_s=0)
    assert successor.exists(next_one)
    assert replaced.collect({digest_of(b"own"), next_one}, grace_s=0) == [], "nothing to do"
    assert successor.collect({next_one}, grace_s=0) == [digest_of(b"own")]


def test_what_comes_after_a_collection_is_found_by_the_next_one(tmp_path: Path) -> None:
    put(DirectoryBlobs(tmp_path), b"of an earlier process")
    store = DirectoryBlobs(tmp_path)
    assert store.collect(set(), grace_s=0) == [digest_of(b"of an earlier process")]
    kept, dropped, garbage = (put(store, data) for data in (b"kept", b"dropped", b"garbage"))
    for digest in (kept, dropped, garbage):
        store.settle(digest)
    store.drop(dropped)
    assert store.collect({kept}, grace_s=0) == [garbage]
    assert list(store.digests()) == [kept]


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_leader_that_is_frozen_while_it_collects_deletes_nothing_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_moved: bool
) -> None:
    """Not even a blob of its own that nobody needs: its successor has stored the same bytes."""
    frozen = DirectoryBlobs(tmp_path)
    own = put(frozen, b"the same bytes")
    frozen.settle(own)
    successors: list[DirectoryBlobs] = []
    move = Path.rename

    def wake_late(path: Path, target: Path) -> Path:
        if successors:
            return move(path, target)
        # Between its last look and the deed, or between the two steps of the deed.
        moved = move(path, target) if is_moved else None
        successors.append(DirectoryBlobs(tmp_path))
        put(successors[0], b"the same bytes")
        return moved or move(path, target)

    monkeypatch.setattr(Path, "rename", wake_late)
    with nullcontext() if is_moved else pytest.raises(StaleError):
        frozen.collect(set(), grace_s=0)
    assert read(successors[0], own) == b"the same bytes"
    assert successors[0].collect({own}, grace_s=0) == []


def test_a_blob_whose_writing_failed_after_it_had_its_name_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryBlobs(tmp_path)
    kept = put(store, CONTENT)
    assert store.collect({kept}, grace_s=0) == []

    def fail(_path: Path) -> None:
        raise OSError(errno.EIO, "the disk does not answer")

    with monkeypatch.context() as failing:
        failing.setattr(blobs, "sync_folder", fail)
        failing.setattr(files, "sync_folder", lambda _path: None)
        with pytest.raises(OSError, match="does not answer"):
            put(store, b"half")
    assert store.exists(digest_of(b"half"))
    assert store.collect({kept}, grace_s=0) == [digest_of(b"half")]
    assert not store.exists(digest_of(b"half"))


def test_a_disk_that_takes_little_at_a_time_gets_it_all_and_one_that_fails_to_sync_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, store = os.write, DirectoryBlobs(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
        assert read(store, put(store, CONTENT[:3000])) == CONTENT[:3000]

    def fail(descriptor: int) -> None:
        raise OSError(5, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="input/output"):
            put(store, CONTENT)
    assert not store.exists(digest_of(CONTENT))
    assert not temporary(tmp_path)
