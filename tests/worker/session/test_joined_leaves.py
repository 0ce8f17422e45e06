"""A member puts leaves together of pieces that it has and of those that others give it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stratagem.common.base.errors import (
    InvalidInputError,
    NotFoundError,
    OutOfRangeError,
    UnavailableError,
)
from stratagem.common.base.ids import Digest
from stratagem.common.rpc.channel import PLAINTEXT
from stratagem.common.tensors.leaves import LEAF_BYTES, StateFolder
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.session.leaves import (
    LeafPieces,
    check_header,
    check_leaves,
    sent_pieces,
)
from stratagem.worker.session.states import Frozen, freeze
from tests.worker.session.piece_server import empty_folder, serving, written

UPLOAD = f"{7:010}-{'a' * 16}"


def part(seed: int) -> Frozen:
    generator = torch.Generator().manual_seed(seed)
    named = {f"t{n}": torch.randn(n, generator=generator) for n in (5, 0, 300, 7)}
    return freeze(named, {"step": "3"})


def data(state: Frozen) -> bytes:
    return b"".join(state.buffers)


OWN, OTHER = part(1), part(2)


def asked(address: str, name: str = OTHER.name) -> pb.WriteLeavesHeader:
    """Two leaves: of pieces of both, some of them out of order, and of one's own alone."""
    header = pb.WriteLeavesHeader(snapshot=3, store_id="ours", upload=UPLOAD)
    header.holders.add(name=OWN.name)
    header.holders.add(address=address, name=name)
    first, second = header.leaves.add(number=4), header.leaves.add(number=1)
    for holder, offset, size in ((1, 40, 100), (0, 0, 33), (1, 3, 9), (0, 33, 0), (0, 1000, 248)):
        first.pieces.add(holder=holder, offset=offset, size=size)
    second.pieces.add(holder=0, offset=0, size=1248)
    return header


EXPECTED = data(OTHER)[40:140] + data(OWN)[:33] + data(OTHER)[3:12] + data(OWN)[1000:]


async def test_pieces_make_the_leaf_and_joined_leaves_are_written(
    tmp_path: Path,
) -> None:
    folder = empty_folder(tmp_path)
    async with serving(OTHER) as (address, other):
        header = asked(address)
        async with LeafPieces(OWN, header, PLAINTEXT) as pieces:
            assert b"".join(await pieces.gather(header.leaves[0])) == EXPECTED
            assert b"".join(await pieces.gather(header.leaves[1])) == data(OWN)
        (once,) = other.asked
        assert [(each.offset, each.size) for each in once.pieces.ranges] == [(40, 100), (3, 9)]
        assert once.snapshot == 3
        check_header(header)
        first, *told = [each async for each in written(folder, OWN, header)]
    assert first.name == OWN.name
    found = {n.leaf.number: folder.read_leaf(Digest(n.leaf.digest.hex())) for n in told}
    assert found == {4: EXPECTED, 1: data(OWN)}


async def test_a_part_and_its_mirror_are_described_and_given(tmp_path: Path) -> None:
    both = replace(OWN, mirror=OTHER)
    header = pb.WriteLeavesHeader(upload=UPLOAD, describe=True)
    check_header(header)
    folder = StateFolder(tmp_path)  # in which nothing can be written
    (only,) = [each async for each in written(folder, OWN, header)]
    assert only.manifest.total_bytes == OWN.manifest.total_bytes
    own, mirror = [each async for each in written(folder, both, header)]
    assert only.name == own.name == OWN.name
    assert (own.of_mirror, mirror.name, mirror.of_mirror) == (False, OTHER.name, True)
    header = asked("")
    async with LeafPieces(both, header, PLAINTEXT) as pieces:
        assert b"".join(await pieces.gather(header.leaves[0])) == EXPECTED
    wanted = pb.SnapshotPieces(name=OTHER.name, ranges=[pb.ByteRange(offset=40, size=100)])
    assert b"".join(sent_pieces(both, wanted).buffers) == data(OTHER)[40:140]
    assert both.mirrored() is OTHER
    with pytest.raises(NotFoundError, match="no mirror of the part of another member"):
        OWN.mirrored()


async def test_a_snapshot_is_meant_by_its_name_and_who_is_gone_is_said() -> None:
    async with serving(part(2)) as (address, _):
        header = asked(address)
        async with LeafPieces(OWN, header, PLAINTEXT) as pieces:
            with pytest.raises(UnavailableError, match=r"no snapshot .* is here"):
                await pieces.gather(header.leaves[0])
        async with LeafPieces(part(1), header, PLAINTEXT) as pieces:
            with pytest.raises(NotFoundError, match="is here any more"):
                await pieces.gather(header.leaves[1])
    async with LeafPieces(OWN, header, PLAINTEXT) as pieces:
        with pytest.raises(UnavailableError, match=f"no pieces from {address}"):
            await pieces.gather(header.leaves[0])


def test_what_makes_no_leaf_and_ranges_beyond_the_end_are_refused() -> None:
    header = asked("nowhere:1")
    header.leaves[1].pieces.add(size=LEAF_BYTES)
    said = f"leaves: leaf 1 has {LEAF_BYTES + 1248} bytes; allowed are up to"
    with pytest.raises(InvalidInputError, match=said):
        check_leaves(header)
    header.leaves[0].pieces[0].holder = 2
    with pytest.raises(InvalidInputError, match="leaves: piece of holder 2; there are 2"):
        check_leaves(header)
    pieces = pb.SnapshotPieces(name=OWN.name, ranges=[pb.ByteRange(offset=1240, size=9)])
    with pytest.raises(OutOfRangeError, match="end behind the 1248"):
        sent_pieces(OWN, pieces)
