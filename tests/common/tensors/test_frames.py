"""Framed chunks are the messages that protobuf makes, byte for byte, in both directions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import google_crc32c
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.tensors.stream import (
    ChunkFrame,
    crc32c,
    frame,
    iter_frames,
    joined,
    patched,
    reading_frames,
    recut,
)
from stratagem.v1 import coordinator_pb2, peer_pb2, worker_pb2

CARRIERS = (
    worker_pb2.GetStateResponse,
    worker_pb2.SetStateRequest,
    worker_pb2.GetGradientsResponse,
    worker_pb2.ApplyGradientsRequest,
    coordinator_pb2.DownloadStateResponse,
    coordinator_pb2.UploadDataRequest,
    peer_pb2.SendRequest,
)
OFFSETS = st.one_of(st.just(0), st.integers(1, 300), st.integers(0, 2**63 - 1))
SIZES = st.one_of(st.integers(1, 300), st.integers(4080, 4200), st.just(2**20))
ZERO_SUFFIX = b"\x96\x14\x18~"  # makes the CRC32C of a hundred thousand zeros zero
read = reading_frames(worker_pb2.SetStateRequest.FromString)


@given(OFFSETS, SIZES, st.sampled_from(CARRIERS))
def test_a_frame_is_what_protobuf_writes_and_reads(offset: int, size: int, carrier: Any) -> None:
    data = (b"%d" % size * size)[:size]
    message = carrier()
    message.chunk.offset, message.chunk.data = offset, data
    message.chunk.crc32c = google_crc32c.value(data)
    raw = frame(offset, memoryview(data))
    assert raw == message.SerializeToString()
    received = reading_frames(carrier.FromString)(raw)
    assert isinstance(received, ChunkFrame) == (len(raw) >= 4096)
    assert received.WhichOneof("message") == "chunk"
    assert (received.chunk.offset, bytes(received.chunk.data)) == (offset, data)
    assert received.chunk.crc32c == crc32c(memoryview(data))
    assert received.HasField("chunk")
    others = {field.name for field in carrier.DESCRIPTOR.fields if field.has_presence} - {"chunk"}
    assert not any(received.HasField(name) for name in others)


@given(
    OFFSETS,
    st.sampled_from([1, 7, 2**16 - 1, 2**16, 2**20, 1_500_007]),
    st.lists(st.integers(0, 1_500_007), max_size=4),
)
def test_a_frame_with_its_checksum_is_the_joined_one(
    offset: int, size: int, cuts: list[int]
) -> None:
    data = (b"%d" % size * size)[:size]
    at = [0, *sorted(min(cut, size) for cut in cuts), size]
    parts = [memoryview(data)[start:end] for start, end in pairwise(at)]
    assert patched(offset, *parts) == patched(offset, data) == joined(offset, *parts)
    assert joined(offset, *parts) == frame(offset, data) == next(iter_frames([parts], offset))


@given(OFFSETS, st.sampled_from([5000, 2**16, 2**20]), st.lists(st.integers(1, 700_000)))
def test_a_frame_cut_into_smaller_ones_carries_the_same(offset: int, size: int, sizes: Any) -> None:
    data = (b"%d" % size * size)[:size]
    offset = min(offset, 2**63 - 1 - size)
    parts = [read(each) for each in recut(frame(offset, data), sizes)]
    assert b"".join(bytes(each.chunk.data) for each in parts) == data
    for part, wanted in zip(parts[:-1], sizes, strict=False):
        assert len(part.chunk.data) == wanted
    for part in parts:
        assert part.chunk.offset == offset
        assert part.chunk.crc32c == crc32c(part.chunk.data)
        offset += len(part.chunk.data)


def test_a_frame_leaves_out_a_checksum_of_zero_and_other_messages_are_left_alone() -> None:
    data = bytes(100_000) + ZERO_SUFFIX
    assert crc32c(data) == 0
    message = worker_pb2.SetStateRequest()
    message.chunk.data = data
    assert patched(0, data) == joined(0, data) == message.SerializeToString()
    for kind in (worker_pb2.ExecuteRequest, worker_pb2.DescribeRequest, peer_pb2.PeerHeader):
        assert reading_frames(kind.FromString) == kind.FromString


PADDING = worker_pb2.SetStateRequest()
PADDING.chunk.data = b"x" * 5000
PADDING.chunk.crc32c = 7
RAW = PADDING.SerializeToString()


@given(st.integers(0, len(RAW) - 1), st.integers(0, 255), st.sampled_from(["set", "cut", "insert"]))
def test_a_damaged_frame_means_what_protobuf_says(at: int, byte: int, how: str) -> None:
    at = at % 12 if at % 2 else len(RAW) - 1 - at % 12  # where the structure is
    change = {
        "set": RAW[:at] + bytes([byte]) + RAW[at + 1 :],
        "cut": RAW[:at] + RAW[at + 1 :],
        "insert": RAW[:at] + bytes([byte]) + RAW[at:],
    }[how]
    try:
        expected = worker_pb2.SetStateRequest.FromString(change)
    except DecodeError:
        expected = None
    try:
        received = read(change)
    except DecodeError:
        received = None
    if expected is None or not isinstance(received, ChunkFrame):
        assert received == expected
        return
    assert expected.WhichOneof("message") == "chunk"
    assert received.offset == expected.chunk.offset
    assert received.data == expected.chunk.data
    assert received.crc32c == expected.chunk.crc32c
