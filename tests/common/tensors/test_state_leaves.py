"""A state in leaves has all of its bytes once, and a digest that its content alone decides."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import blob_digest
from stratagem.common.tensors.leaves import (
    LEAF_BYTES,
    SMALL_BYTES,
    Leaf,
    LeafStream,
    StateHasher,
    leaves_of,
    list_bytes,
    pieces_of,
    places_of,
    read_list,
    state_digest,
)
from stratagem.common.tensors.manifest import Manifest, Purpose, build_manifest

LEAF, SMALL = 10, 4
"""Sizes at which few bytes are several leaves."""


def manifest_of(*sizes: int, step: str = "1") -> Manifest:
    named = [(f"t{number}", "uint8", (size,)) for number, size in enumerate(sizes)]
    return build_manifest(named, Purpose.STATE, metadata={"step": step})


def data_of(manifest: Manifest) -> bytes:
    return (bytes(range(251)) * (manifest.total_bytes // 251 + 1))[: manifest.total_bytes]


def buffers_of(manifest: Manifest) -> list[memoryview]:
    data = memoryview(data_of(manifest))
    return [data[spec.offset : spec.offset + spec.size_bytes] for spec in manifest.stored()]


SIZES = [(), (0,), (1,), (7,), (0, 25, 3, 0, 4, 3, 10, 2, 3), (3,) * 11, (21, 20, 19)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_byte_is_in_one_leaf(sizes: tuple[int, ...]) -> None:
    manifest = manifest_of(*sizes)
    leaves = leaves_of(manifest, LEAF, SMALL)
    ranges = sorted(part for leaf in leaves for part in leaf.ranges)
    covered = [at for offset, size in ranges for at in range(offset, offset + size)]
    assert covered == list(range(manifest.total_bytes))
    assert all(0 < leaf.size <= LEAF for leaf in leaves)
    assert [place.offset for place in places_of(leaves)] == [offset for offset, _ in ranges]


def test_large_tensors_are_cut_from_their_own_start_and_small_ones_stand_together() -> None:
    assert leaves_of(manifest_of(3, 25, 3, 4, 3, 3), LEAF, SMALL) == (
        *(Leaf(((3, 10),)), Leaf(((13, 10),)), Leaf(((23, 5),))),
        Leaf(((31, 4),)),
        Leaf(((0, 3), (28, 3), (35, 3))),
        Leaf(((38, 3),)),
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stream_deals_out_the_leaves(sizes: tuple[int, ...], step: int) -> None:
    manifest = manifest_of(*sizes)
    leaves = leaves_of(manifest, LEAF, SMALL)
    stream, dealt, ended = LeafStream(leaves), [b""] * len(leaves), []
    data = data_of(manifest)
    for start in range(0, len(data), step):
        for number, piece, is_end in stream.deal(data[start : start + step]):
            dealt[number] += piece
            ended += [number] if is_end else []
    assert stream.is_complete
    assert dealt == [b"".join(pieces_of(leaf, manifest, buffers_of(manifest))) for leaf in leaves]
    assert sorted(ended) == list(range(len(leaves)))
    with pytest.raises(InvalidInputError, match="more than the state has"):
        list(stream.deal(b"x"))


def digests_of(manifest: Manifest) -> list[Digest]:
    leaves = leaves_of(manifest)
    pieces = (pieces_of(leaf, manifest, buffers_of(manifest)) for leaf in leaves)
    return [Digest(hashlib.sha256(b"".join(each)).hexdigest()) for each in pieces]


@pytest.mark.parametrize("sizes", [(), (7, 0), (SMALL_BYTES + 1, 3, 9, 2 * SMALL_BYTES)], ids=str)
def test_the_digest_is_that_of_the_list(sizes: tuple[int, ...]) -> None:
    manifest = manifest_of(*sizes)
    content = list_bytes(manifest, digests_of(manifest))
    listed = read_list(content, "state")
    assert listed.manifest == replace(manifest, is_in_leaves=True)
    assert list(listed.digests) == digests_of(manifest)
    named = hashlib.sha256(content).hexdigest()
    assert state_digest(listed.manifest, [data_of(manifest)]) == named
    hasher = StateHasher(listed.manifest)
    for piece in cut(data_of(manifest), 100_003):
        hasher.update(piece)
    assert hasher.digest() == named
    # What no list is made of has the digest of its file.
    assert state_digest(manifest, [data_of(manifest)]) == blob_digest(manifest, [data_of(manifest)])


def cut(data: bytes, step: int) -> Iterator[bytes]:
    return (data[start : start + step] for start in range(0, len(data), step))


def test_metadata_and_names_count_and_what_is_no_list_is_refused() -> None:
    digests = {
        hashlib.sha256(list_bytes(each, digests_of(each))).hexdigest()
        for each in (manifest_of(7), manifest_of(7, step="2"), manifest_of(7, 0))
    }
    assert len(digests) == 3
    content = list_bytes(manifest_of(7), digests_of(manifest_of(7)))
    with pytest.raises(InvalidInputError, match="no list of leaves"):
        read_list(content[1:], "state")
    for wrong in (content[:-1], content + bytes(32)):
        with pytest.raises(InvalidInputError, match="1 leaves have 32"):
            read_list(wrong, "state")
    assert (LEAF_BYTES, SMALL_BYTES) == (64 * 2**20, 2**20)
