"""Ranges of what lies in several buffers are the bytes of the whole there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import OutOfRangeError
from stratagem.common.tensors.leaves import ByteReader, pieces_manifest
from stratagem.common.tensors.stream import CHUNK_BYTES, iter_views, piece_bytes

KIB = 2**10
MIB = 2**20
SIZES = st.lists(st.integers(0, 9), max_size=5)


@given(SIZES, st.data())
def test_ranges_are_those_of_the_whole(sizes: list[int], data: st.DataObject) -> None:
    whole = bytes(range(sum(sizes)))
    buffers, at = [], 0
    for size in sizes:
        buffers.append(memoryview(whole)[at : at + size])
        at += size
    offsets = st.integers(0, len(whole))
    ranges = []
    for offset in data.draw(st.lists(offsets, max_size=4)):
        ranges.append((offset, data.draw(st.integers(0, len(whole) - offset))))
    found = b"".join(ByteReader(buffers).all_views(ranges))
    assert found == b"".join(whole[offset : offset + size] for offset, size in ranges)


@pytest.mark.parametrize("end", [(0, 8), (7, 1), (9, 0)])
def test_what_is_beyond_the_end_is_refused(end: tuple[int, int]) -> None:
    with pytest.raises(OutOfRangeError, match="end behind the 7 that are here"):
        ByteReader([memoryview(bytes(3)), memoryview(bytes(4))]).all_views([end])


def test_pieces_travel_as_one_tensor_of_bytes() -> None:
    assert pieces_manifest(7).total_bytes == 7
    assert [spec.dtype for spec in pieces_manifest(0).tensors] == ["uint8"]


@pytest.mark.parametrize(
    ("total_bytes", "expected"),
    [
        *((num, 256 * KIB) for num in (0, 1, 2 * MIB)),
        *((2 * MIB + 1, 512 * KIB), (4_000_000, 512 * KIB), (8 * MIB, MIB)),
        *((num, CHUNK_BYTES) for num in (8 * MIB + 1, 40_000_000, 2**40)),
    ],
)
def test_small_ranges_have_small_pieces(total_bytes: int, expected: int) -> None:
    assert piece_bytes(total_bytes) == expected


@pytest.mark.parametrize("total_bytes", [0, 1, 7, 256 * KIB, 2 * MIB + 7])
def test_the_pieces_make_up_the_range(total_bytes: int) -> None:
    data = bytes(range(256)) * (total_bytes // 256 + 1)
    data = data[:total_bytes]
    pieces = [
        b"".join(parts) for parts in iter_views([memoryview(data)], 0, piece_bytes(total_bytes))
    ]
    assert b"".join(pieces) == data
    assert {len(piece) for piece in pieces[:-1]} <= {piece_bytes(total_bytes)}
