"""What every blob store promises, wherever the blobs lie."""

import threading

import pytest

from stratagem.common.base.errors import IntegrityError, InvalidInputError, NotFoundError
from stratagem.common.base.ids import Digest
from tests.coordinator.store.places import CONTENT, Place, digest_of, put, read


# Nothing, less than a piece, and more than a part of a multipart upload.
@pytest.mark.parametrize("content", [b"", b"1234567", b"x" * (9 << 20)], ids=len)
def test_a_blob_is_named_by_its_bytes_and_comes_back(blob_place: Place, content: bytes) -> None:
    store = blob_place.blobs()
    digest = put(store, content, step=1 << 20)
    assert digest == digest_of(content)
    assert store.exists(digest)
    assert read(store, digest) == content
    assert read(blob_place.blobs(), digest) == content
    assert put(store, content, step=1 << 20) == digest
    with blob_place.blobs().open(digest) as file:
        for at in (1001, 0):
            file.seek(at)
            assert file.read() == content[at:]


def test_what_is_not_there_is_not_found(blob_place: Place) -> None:
    store = blob_place.blobs()
    assert not store.exists(digest_of(b""))
    assert not store.keep(digest_of(b""))
    with pytest.raises(NotFoundError, match="not in the store"):
        store.open(digest_of(b""))


def test_a_name_that_is_no_digest_is_refused(blob_place: Place) -> None:
    store = blob_place.blobs()
    for name in ("", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"):
        for act in (store.open, store.exists, store.keep, store.location):
            with pytest.raises(InvalidInputError, match="digest"):
                act(Digest(name))


def test_a_flipped_bit_is_found_at_the_first_read_and_writing_again_heals(
    blob_place: Place,
) -> None:
    digest = put(blob_place.blobs(), CONTENT)
    for at in (0, 5000, len(CONTENT) - 1):
        blob_place.damage(digest, at)
        store = blob_place.blobs()
        with pytest.raises(IntegrityError, match=f"blob {digest} is damaged"):
            store.open(digest)
        put(store, CONTENT)
        assert read(blob_place.blobs(), digest) == CONTENT


def test_a_blob_of_another_length_than_announced_is_refused_without_a_trace(
    blob_place: Place,
) -> None:
    store = blob_place.blobs()
    writer = store.writer(3)
    with pytest.raises(IntegrityError, match="more than the announced 3 bytes"):
        writer.write(b"four")
    writer = store.writer(3)
    writer.write(b"tw")
    with pytest.raises(IntegrityError, match="2 of the announced 3 bytes"):
        writer.commit()
    writer = store.writer(3)
    writer.write(b"abc")
    writer.abort()
    writer.abort()
    assert not store.exists(digest_of(b"abc"))
    assert list(blob_place.root.rglob("tmp/*")) == []


def test_only_what_nobody_names_is_collected_and_not_what_was_just_written(
    blob_place: Place,
) -> None:
    now_s = 50.0
    old = put(blob_place.blobs(), b"of an earlier process")
    store = blob_place.blobs(lambda: now_s)
    live, fresh = put(store, b"live"), put(store, b"fresh")
    unfinished = store.writer(10)
    with store.open(old) as reader:
        assert store.collect({live}, grace_s=60) == [old]
        assert reader.read() == b"of an earlier process"
    now_s += 61
    assert store.collect({live, old}, grace_s=60) == [fresh]
    assert (store.exists(live), store.exists(fresh)) == (True, False)
    with pytest.raises(NotFoundError):
        store.open(fresh)
    unfinished.write(b"0123456789")
    assert store.exists(unfinished.commit())


def test_what_is_about_to_be_named_is_kept_as_if_just_written(blob_place: Place) -> None:
    now_s = 50.0
    old = put(blob_place.blobs(), b"old")
    store = blob_place.blobs(lambda: now_s)
    assert store.keep(old)
    assert store.collect((), grace_s=60) == []
    now_s += 61
    assert store.collect((), grace_s=60) == [old]
    assert not store.keep(old)


def test_what_was_named_goes_as_soon_as_nobody_needs_it(blob_place: Place) -> None:
    """And not before that, however many have written the same."""
    store = blob_place.blobs()
    named, unnamed = put(store, b"named"), put(store, b"on its way")
    twice = put(store, b"of two runs")
    assert put(store, b"of two runs") == twice
    for digest in (named, twice):
        store.settle(digest)
    assert store.collect({named}, grace_s=60) == []
    assert store.collect((), grace_s=60) == [named]
    assert (store.exists(unnamed), store.exists(twice)) == (True, True)
    store.settle(twice)
    assert store.collect((), grace_s=60) == [twice]
    assert put(store, b"named") == named
    assert store.collect((), grace_s=60) == [], "it was written anew"


def test_many_threads_write_and_read_at_once(blob_place: Place) -> None:
    store, fresh, failed = blob_place.blobs(), blob_place.blobs(), []

    def work(number: int) -> None:
        content = CONTENT[number % 3 :]
        try:
            assert read(fresh, put(store, content, step=100_000)) == content
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
