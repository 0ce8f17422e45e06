"""States in leaves are read as the files that they make, and leaves stay while they are needed."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from stratagem.common.base.errors import IntegrityError, StaleError, UnavailableError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import blob_digest, header_bytes, header_of
from stratagem.common.tensors.leaves import SMALL_BYTES, StateFolder, state_digest
from stratagem.common.tensors.manifest import DEFAULT_LIMITS
from stratagem.coordinator.store import leaves as leaf_blobs
from stratagem.coordinator.store.blobs import DamagedBlobError, DirectoryBlobs, MissingBlobError
from stratagem.coordinator.store.leaves import LeafBlobs, in_folder
from tests.coordinator.store.leaf_states import State, holds, leaves, state
from tests.coordinator.store.places import digest_of, put
from tests.coordinator.updates.updates import flip_bit

Open = Callable[[], LeafBlobs]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    terms = iter(range(1, 100))

    def open_next() -> LeafBlobs:
        whole = DirectoryBlobs(tmp_path / "blobs")
        place = in_folder(tmp_path / "states")
        return LeafBlobs(whole, place, next(terms), writes_leaves=True, limits=DEFAULT_LIMITS)

    return open_next


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "states")


def relayed(store: LeafBlobs, of: State, kept: tuple[Digest, ...] = ()) -> Digest:
    """Write a state whose bytes come to the coordinator."""
    writer = store.state_writer(of[0], kept)
    for start in range(0, len(of[1]), 300_007):
        writer.write(of[1][start : start + 300_007])
    return writer.commit()


def written_leaves(
    folder: StateFolder, upload: str, of: State, have: Collection[Digest] = ()
) -> list[Digest]:
    """What a worker does: write what is not there; the digests of all leaves."""
    made = leaves(of)
    for digest, content in made.items():
        if digest not in have:
            folder.write_leaf(digest, upload, [memoryview(content)])
    return [*made]


def direct(
    store: LeafBlobs, folder: StateFolder, of: State, kept: tuple[Digest, ...] = ()
) -> Digest:
    with store.upload(kept) as upload:
        return upload.commit(of[0], written_leaves(folder, upload.name, of, upload.have))


def names(folder: StateFolder) -> list[str]:
    return sorted(path.name for path in folder.leaves.glob("??/*"))


def collect(store: LeafBlobs, *live: Digest) -> list[Digest]:
    """Collect, as if all had been written long ago."""
    return store.collect(live, -1.0)


def test_relayed_and_direct_have_one_digest_and_read_as_the_file(
    opened: Open, folder: StateFolder
) -> None:
    manifest, data = state(1)
    store = opened()
    digest = relayed(store, (manifest, data))
    with store.open(digest) as file:
        read, start = header_of(file, digest)
        assert read == manifest
        assert file.is_in_leaves
        file.seek(0)
        content = file.read()
        assert content == header_bytes(manifest) + data
        assert digest_of(content) == blob_digest(manifest, [data])
        for at in (0, start - 1, start, start + SMALL_BYTES + 4, len(content) - 1):
            file.seek(at)
            assert file.read(9) == content[at : at + 9]
        for offset in (0, 1, SMALL_BYTES, len(data) - 1):
            assert b"".join(file.source()(offset)) == data[offset:]
    store = opened()
    assert direct(store, folder, (manifest, data)) == digest
    listed = folder.read_list(digest)
    assert listed is not None
    assert b"".join(folder.read_state(listed)) == data
    assert state_digest(listed.manifest, [data]) == digest
    assert store.location(digest) == ""


def test_leaves_of_kept_states_are_not_written_again(opened: Open, folder: StateFolder) -> None:
    store = opened()
    first = direct(store, folder, state(1))
    before = set(names(folder))
    assert len(before) == 3  # of 1 MiB and a bit, of 1 MiB, and the small ones together
    second = direct(store, folder, state(1, changed=1), (first, Digest("0" * 64)))
    third = relayed(store, state(1, changed=2), (first, second))
    assert len(set(names(folder)) - before) == 2
    collect(store, second)
    assert holds(store, second, state(1, changed=1))
    assert not store.exists(first)
    assert not store.exists(third)


def test_no_more_leaves_are_told_than_a_message_has_room_for(
    opened: Open, folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    first = direct(store, folder, state(1))
    second = direct(store, folder, state(1, changed=1))
    listed = folder.read_list(second)
    assert listed is not None
    monkeypatch.setattr(leaf_blobs, "MAX_HAVE", 2)
    with store.upload((second, first)) as upload:
        assert upload.have == set(listed.digests[:2])


def test_what_nothing_names_is_collected_and_what_a_killed_coordinator_has_left(
    opened: Open, folder: StateFolder
) -> None:
    store = opened()
    kept = direct(store, folder, state(1))
    needed = names(folder)
    with store.upload(()) as upload:
        written_leaves(folder, upload.name, state(2))
        (folder.temporary / f"{upload.name}-{'b' * 16}").write_bytes(b"half")
        collect(store, kept)
        assert len(names(folder)) == 2 * len(needed), "the upload is under way"
        assert len(list(folder.temporary.iterdir())) == 1
    collect(store, kept)
    assert names(folder) == needed
    assert list(folder.temporary.iterdir()) == []
    upload = store.upload((kept,))
    written_leaves(folder, upload.name, state(1, changed=1), upload.have)
    after, same = opened(), state(1, changed=1)
    collect(after, kept)
    assert names(folder) == needed
    assert direct(after, folder, same, (kept,)) == relayed(opened(), same)


@pytest.mark.parametrize("changed", [0, 1], ids=["takes all", "writes some"])
def test_an_upload_that_ends_while_leaves_are_collected_loses_none(
    opened: Open, folder: StateFolder, monkeypatch: pytest.MonkeyPatch, changed: int
) -> None:
    store = opened()
    first = direct(store, folder, state(1))
    upload = store.upload((first,))
    of = state(1, changed)
    leaves = written_leaves(folder, upload.name, of, upload.have)
    delete, committed = store.leaves.collect, list[Digest]()

    def late(*known: Any) -> None:
        """After it was found out what is needed, and before anything is deleted."""
        with upload:
            committed.append(upload.commit(of[0], leaves))
        delete(*known)

    monkeypatch.setattr(store.leaves, "collect", late)
    collect(store)
    monkeypatch.undo()
    assert holds(store, committed[0], of)
    collect(store, *committed)
    assert holds(store, committed[0], of)


def test_a_list_that_no_fact_names_goes_with_its_leaves(opened: Open, folder: StateFolder) -> None:
    store = opened()
    digest = direct(store, folder, state(1))
    assert store.collect((), 60.0) == [], "its fact may be on its way"
    store.settle(digest)
    assert store.collect((), 60.0) == [digest]
    assert names(folder) == []
    with pytest.raises(MissingBlobError):
        store.open(digest)


def test_readers_and_uploads_keep_what_they_need_of_a_state_that_goes(
    opened: Open, folder: StateFolder
) -> None:
    store = opened()
    digest = direct(store, folder, state(1))
    file = store.open(digest)
    with store.upload((digest,)) as upload:
        collect(store)
        assert not store.exists(digest)
        made = written_leaves(folder, upload.name, state(1), upload.have)
        assert upload.commit(state(1)[0], made) == digest
    assert holds(store, digest, state(1))
    collect(store)
    assert not store.exists(digest)
    assert file.read().endswith(state(1)[1])
    file.close()
    del file
    collect(store)
    assert names(folder) == []


def test_of_equal_copies_one_stays_and_that_is_sound(opened: Open, folder: StateFolder) -> None:
    store = opened()
    digest = direct(store, folder, state(1))
    direct(store, folder, state(1))
    assert len(names(folder)) == 6
    collect(store, digest)
    assert len(names(folder)) == 3
    with store.upload(()) as upload:  # which then dies, and has written other bytes
        for leaf in written_leaves(folder, upload.name, state(1)):
            (newest, _) = folder.copies(leaf)
            newest.write_bytes(b"other bytes")
        collect(store, digest)
        assert len(names(folder)) == 6
    collect(store, digest)
    assert len(names(folder)) == 3
    assert holds(store, digest, state(1))


def test_a_replaced_coordinator_deletes_nothing(opened: Open, folder: StateFolder) -> None:
    frozen = opened()
    digest = direct(frozen, folder, state(1))
    after = opened()
    with pytest.raises(StaleError, match="another coordinator"):
        collect(frozen)
    assert holds(after, digest, state(1))


def test_a_damaged_leaf_is_found_and_another_copy_read(opened: Open, folder: StateFolder) -> None:
    digest = direct(opened(), folder, state(1))
    for path in folder.leaves.glob("??/*"):
        flip_bit(path, -1)
    damaged = pytest.raises(DamagedBlobError, match=rf"{digest} is damaged: its leaf leaves/\w\w/")
    with opened().open(digest) as file, damaged:
        file.read()
    store = opened()
    direct(store, folder, state(1))
    assert holds(store, digest, state(1))
    with store.open(digest) as file:
        file.read()
        for path in folder.leaves.glob("??/*"):  # and changes while it is open
            path.write_bytes(bytes(path.stat().st_size))
        file.seek(0)
    with store.open(digest) as file, pytest.raises((DamagedBlobError, UnavailableError)):
        file.read()


def test_a_damaged_list_is_no_state(opened: Open, folder: StateFolder) -> None:
    digest = direct(opened(), folder, state(1))
    path = next(folder.lists.glob("??/*"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    store = opened()
    with pytest.raises(DamagedBlobError):
        store.open(digest)
    collect(store, digest)
    assert len(names(folder)) == 3, "nobody knows which leaves it names"


def test_a_state_that_is_not_there_whole_is_none(opened: Open, folder: StateFolder) -> None:
    store, (manifest, data) = opened(), state(1)
    with store.upload(()) as upload:
        made = written_leaves(folder, upload.name, (manifest, data))
        assert upload.check(made[0])
        assert not upload.check(digest_of(b"another"))
        folder.copies(made[0])[0].unlink()
        with pytest.raises(IntegrityError, match="1 leaves of a state are not there"):
            upload.commit(manifest, made)
    writer = store.state_writer(manifest, ())
    writer.write(data[:-1])
    with pytest.raises(IntegrityError, match="fewer came"):
        writer.commit()
    writer.abort()
    assert list(folder.temporary.iterdir()) == []
    collect(store)
    assert names(folder) == []


def test_whole_blobs_are_beside_them(opened: Open) -> None:
    store = opened()
    digest = put(store, b"data")
    with store.open(digest) as file:
        assert not file.is_in_leaves
        assert file.read() == b"data"
    assert store.keep(digest)
    assert Path(store.location(digest)).read_bytes() == b"data"
    store.settle(digest)
    assert collect(store) == [digest]
