"""In how large pieces a range of bytes is read, sent and worked on."""

import pytest

from stratagem.common.tensors.chunks import CHUNK_BYTES, iter_views, piece_bytes

KIB = 2**10
MIB = 2**20


@pytest.mark.parametrize(
    ("total_bytes", "expected"),
    [
        (0, 256 * KIB),
        (1, 256 * KIB),
        (2 * MIB, 256 * KIB),
        (2 * MIB + 1, 512 * KIB),
        (4_000_000, 512 * KIB),
        (8 * MIB, MIB),
        (8 * MIB + 1, CHUNK_BYTES),
        (40_000_000, CHUNK_BYTES),
        (2**40, CHUNK_BYTES),
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
