"""Leaves in a bucket: what one term has written another does not rely on, and workers have no keys.

What states in leaves promise in any place is in test_leaf_blobs.py.
"""

from collections.abc import Callable, Sequence

import pytest

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.common.rpc.signed_objects import SignedObjects
from stratagem.coordinator.store.blobs import DamagedBlobError, MissingBlobError
from stratagem.coordinator.store.leaf_objects import LeafObjects
from stratagem.coordinator.store.leaves import LeafBlobs
from tests.coordinator.store.leaf_states import State, holds, leaves, state
from tests.coordinator.store.places import LeafBucket, digest_of, read

WORKER = SignedObjects(allows_http=True)


def signs(store: LeafBlobs) -> LeafObjects:
    assert store.signs is not None
    return store.signs


def direct(store: LeafBlobs, of: State, kept: Sequence[Digest] = ()) -> tuple[Digest, int]:
    """What members and coordinator do: the digest, and how many leaves were written."""
    with store.upload(kept) as upload:
        made = leaves(of)
        new = {leaf: content for leaf, content in made.items() if leaf not in upload.have}
        urls = signs(store).signed_puts([*new], upload.name)
        for url, content in zip(urls, new.values(), strict=True):
            WORKER.put(url, [memoryview(content)], len(content))
        assert upload.lacking({leaf: len(content) for leaf, content in new.items()}) == set()
        return upload.commit(of[0], [*made]), len(new)


def collect(store: LeafBlobs, *live: Digest) -> None:
    store.collect(live, -1.0)


def late_collection(store: LeafBlobs) -> Callable[[], None]:
    """What a coordinator deletes that has looked at all leaves, finds that nothing names them, and
    freezes then."""
    copies = store.leaves.all_copies()
    return lambda: store.leaves.collect(copies, (), ())


def test_a_leaf_is_written_and_read_by_signed_requests(leaf_bucket: LeafBucket) -> None:
    store, of = leaf_bucket.blobs(), state(1)
    digest, _ = direct(store, of)
    listed = leaves(of)
    urls = signs(store).signed_gets([*listed])
    for url, content in zip(urls, listed.values(), strict=True):
        assert WORKER.get(url, len(content)) == content
        assert "X-Amz-Expires=900" in url
    assert holds(leaf_bucket.blobs(), digest, of)
    with pytest.raises(MissingBlobError):
        signs(store).signed_gets([digest_of(b"another")])


def test_what_an_earlier_term_has_written_is_written_again(leaf_bucket: LeafBucket) -> None:
    first = leaf_bucket.blobs()
    digest, num_first = direct(first, state(1))
    assert direct(first, state(1, changed=1), [digest])[1] == 1
    second = leaf_bucket.blobs()
    assert direct(second, state(1, changed=2), [digest])[1] == num_first
    assert direct(second, state(1, changed=3), [digest])[1] == 1


def test_a_replaced_coordinator_deletes_nothing_that_its_successor_relies_on(
    leaf_bucket: LeafBucket,
) -> None:
    frozen = leaf_bucket.blobs()
    direct(frozen, state(1))
    delete = late_collection(frozen)
    after = leaf_bucket.blobs()
    digest, _ = direct(after, state(1))
    assert len(leaf_bucket.names("leaves")) == 6
    delete()
    assert holds(leaf_bucket.blobs(), digest, state(1))
    assert len(leaf_bucket.names("leaves")) == 3


def test_a_state_that_a_fact_will_name_is_copied_under_the_own_term(
    leaf_bucket: LeafBucket,
) -> None:
    frozen = leaf_bucket.blobs()
    digest, num = direct(frozen, state(1))
    delete = late_collection(frozen)
    after = leaf_bucket.blobs()
    assert after.keep(digest)
    assert len(leaf_bucket.names("leaves")) == 2 * num
    assert after.keep(digest), "and it is there now"
    assert len(leaf_bucket.names("leaves")) == 2 * num
    delete()
    assert len(leaf_bucket.names("leaves")) == num
    assert holds(leaf_bucket.blobs(), digest, state(1))
    assert direct(after, state(1), [digest])[1] == 0
    direct(after, state(1))
    assert len(leaf_bucket.names("leaves")) == 2 * num
    collect(after, digest)
    assert len(leaf_bucket.names("leaves")) == num, "of equal copies one stays"
    assert holds(leaf_bucket.blobs(), digest, state(1))
    assert direct(after, state(1), [digest])[1] == 0, "which is relied on"
    assert not after.keep(digest_of(b"another"))
    leaf_bucket.objects().delete(leaf_bucket.names("leaves")[:1])
    assert not leaf_bucket.blobs().keep(digest), "a leaf is missing"


def test_what_an_upload_writes_stays_until_it_ends(leaf_bucket: LeafBucket) -> None:
    store = leaf_bucket.blobs()
    kept, num = direct(store, state(1))
    with store.upload([kept]) as upload:
        (url,) = signs(store).signed_puts([digest_of(b"new")], upload.name)
        WORKER.put(url, [memoryview(b"new")], 3)
        collect(store)
        assert len(leaf_bucket.names("leaves")) == num + 1, "and what it relies on"
    WORKER.put(url, [memoryview(b"new")], 3)  # a worker that is late
    collect(store)
    assert leaf_bucket.names("leaves") == []


def test_a_leaf_that_is_not_there_with_its_size_is_lacking(leaf_bucket: LeafBucket) -> None:
    store, of = leaf_bucket.blobs(), state(1)
    made = leaves(of)
    first, *others = made
    with store.upload(()) as upload:
        urls = signs(store).signed_puts([*made], upload.name)
        for url, content in list(zip(urls, made.values(), strict=True))[:-1]:
            sent = content[:-1] if content is made[first] else content
            WORKER.put(url, [memoryview(sent)], len(sent))
        lacking = upload.lacking({leaf: len(content) for leaf, content in made.items()})
        assert lacking == {first, others[-1]}
        assert not upload.check(first)
        assert upload.check(others[0])
        assert not upload.check(others[-1])
        with pytest.raises(IntegrityError, match="2 leaves of a state are not there"):
            upload.commit(of[0], [*made])


def test_of_copies_a_sound_one_is_read_and_stays_and_without_one_it_is_named(
    leaf_bucket: LeafBucket,
) -> None:
    store = leaf_bucket.blobs()
    digest, num = direct(store, state(1))
    leaf, *_ = leaves(state(1))
    with store.upload(()) as upload:  # by which a worker writes other bytes
        (url,) = signs(store).signed_puts([leaf], upload.name)
        WORKER.put(url, [memoryview(b"other")], 5)
    assert holds(leaf_bucket.blobs(), digest, state(1))
    collect(store, digest)
    assert len(leaf_bucket.names("leaves")) == num
    writes_files = leaf_bucket.blobs()
    writes_files.writes_leaves = False
    assert holds(writes_files, digest, state(1))
    assert writes_files.is_in_leaves(digest)
    leaf_bucket.damage_objects(f"leaves/{leaf}", 0)
    text = rf"{digest} is damaged: its leaf leaves/{leaf}/\* has other bytes"
    with pytest.raises(DamagedBlobError, match=text):
        read(leaf_bucket.blobs(), digest)
    leaf_bucket.objects().delete([each for each in leaf_bucket.names("leaves") if leaf in each])
    with pytest.raises(DamagedBlobError, match=f"{digest} is damaged: its leaf {leaf} is not"):
        read(leaf_bucket.blobs(), digest)
