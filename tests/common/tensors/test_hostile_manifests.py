"""Manifests and chunks that lie are refused, before anything is allocated or written."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import google_crc32c
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    LimitError,
    OutOfRangeError,
)
from stratagem.common.tensors.manifest import Limits, Purpose, build_manifest, from_proto, to_proto
from stratagem.common.tensors.stream import MAX_CHUNK_BYTES, ChunkWriter
from stratagem.v1 import tensor_pb2

Message = tensor_pb2.Manifest


def honest() -> Message:
    manifest = build_manifest(
        [("a", "float32", (2, 3)), ("b", "int64", (4,)), ("c", "int64", (4,))],
        Purpose.STATE,
        aliases={"c": "b"},
        metadata={"step": "1"},
    )
    return to_proto(manifest)


def spec(message: Message, **changes: object) -> None:
    tensor = message.tensors[1]
    for name, value in changes.items():
        if name == "shape":
            del tensor.shape[:]
            tensor.shape.extend(value)  # type: ignore[arg-type]
        else:
            setattr(tensor, name, value)


LIES: list[tuple[str, Callable[[Message], object], type[Exception], str]] = [
    ("negative", lambda m: spec(m, shape=[-4]), InvalidInputError, "negative"),
    ("negatives", lambda m: spec(m, shape=[-2, -2]), InvalidInputError, "negative"),
    ("overlap", lambda m: spec(m, offset=8), InvalidInputError, "overlaps"),
    ("gap", lambda m: spec(m, offset=32), InvalidInputError, "gap"),
    ("size", lambda m: spec(m, size_bytes=31), InvalidInputError, "has 32"),
    ("total", lambda m: setattr(m, "total_bytes", 57), InvalidInputError, "ends at 56"),
    ("short total", lambda m: setattr(m, "total_bytes", 0), InvalidInputError, "ends at 56"),
    ("huge total", lambda m: setattr(m, "total_bytes", 2**63), LimitError, "total_bytes"),
    ("huge tensor", lambda m: spec(m, shape=[2**34], size_bytes=2**37), LimitError, "size_bytes"),
    ("overflow", lambda m: spec(m, shape=[2**40, 2**40]), LimitError, "address space"),
    ("wraps to 32", lambda m: spec(m, shape=[2**62, 2, 2]), LimitError, "address space"),
    ("hidden", lambda m: spec(m, shape=[0, 2**62, 2**62]), LimitError, "address space"),
    ("dimensions", lambda m: spec(m, shape=[1] * 9), LimitError, "dimensions"),
    ("empty name", lambda m: spec(m, name=""), InvalidInputError, "name"),
    ("control", lambda m: spec(m, name="a\nb"), InvalidInputError, "control"),
    ("reserved", lambda m: spec(m, name="__metadata__"), InvalidInputError, "reserved"),
    ("long name", lambda m: spec(m, name="é" * 129), LimitError, "256 bytes"),
    ("twice", lambda m: spec(m, name="a"), InvalidInputError, "twice"),
    ("no dtype", lambda m: spec(m, dtype=0), InvalidInputError, "dtype"),
    ("new dtype", lambda m: spec(m, dtype=99), InvalidInputError, "dtype"),
    ("self alias", lambda m: spec(m, alias_of="b"), InvalidInputError, "no earlier tensor"),
    ("alias type", lambda m: spec(m, alias_of="a"), InvalidInputError, "differ"),
    ("codec", lambda m: setattr(m, "codec", 1), InvalidInputError, "codec"),
    ("no purpose", lambda m: setattr(m, "purpose", 0), InvalidInputError, "purpose"),
    ("other purpose", lambda m: setattr(m, "purpose", 4), InvalidInputError, "STATE"),
    ("weight", lambda m: setattr(m, "weight", float("nan")), InvalidInputError, "weight"),
    ("negative weight", lambda m: setattr(m, "weight", -1.0), InvalidInputError, "weight"),
    ("digest", lambda m: setattr(m, "digest", "../../x"), InvalidInputError, "digest"),
    ("alias key", lambda m: m.metadata.update({"alias:q": "a"}), InvalidInputError, "alias:q"),
    ("no key", lambda m: m.metadata.update({"": "a"}), InvalidInputError, "metadata"),
    ("long value", lambda m: m.metadata.update({"k": "a" * 70_000}), LimitError, "value"),
    (
        "many keys",
        lambda m: m.metadata.update({f"k{i}": "" for i in range(4097)}),
        LimitError,
        "metadata entries",
    ),
]


@pytest.mark.parametrize(("lie", "error", "match"), [each[1:] for each in LIES], ids=lambda x: None)
def test_manifest_that_lies_is_refused_before_allocation(
    lie: Callable[[Message], object], error: type[Exception], match: str
) -> None:
    message = honest()
    assert from_proto(message, purpose=Purpose.STATE).total_bytes == 56
    lie(message)
    message = Message.FromString(message.SerializeToString())
    tracemalloc.start()
    try:
        with pytest.raises(error, match=match):
            from_proto(message, purpose=Purpose.STATE)
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()


def test_too_many_tensors_and_what_no_sender_may_make_are_refused() -> None:
    message = Message(tensors=[tensor_pb2.TensorSpec(name="x")] * 11)
    with pytest.raises(LimitError, match="limit is 10"):
        from_proto(message, Limits(max_tensors=10))
    many = ((f"{i}" + "x" * 200, "float32", (1,)) for i in range(20_000))
    with pytest.raises(LimitError, match="fewer tensors"):
        to_proto(build_manifest(many, Purpose.STATE))
    for activation_tag in (-1, 2**32):
        with pytest.raises(InvalidInputError, match="uint32"):
            build_manifest([], Purpose.ACTIVATION, activation_tag=activation_tag)
    two = [("a", "int8", (1,)), ("b", "int8", (1,))]
    with pytest.raises(InvalidInputError, match="no earlier tensor"):
        build_manifest(two, Purpose.STATE, aliases={"a": "b"})


def chunk(offset: int, data: bytes) -> tensor_pb2.Chunk:
    return tensor_pb2.Chunk(offset=offset, data=data, crc32c=google_crc32c.value(data))


def flipped(offset: int, data: bytes) -> tensor_pb2.Chunk:
    bad = chunk(offset, data)
    bad.data = bytes([data[0] ^ 1]) + data[1:]
    return bad


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        (chunk(6, b"6"), IntegrityError, "expected at 4"),  # a gap, or out of order
        (chunk(3, b"34"), IntegrityError, "expected at 4"),  # overlap
        (chunk(0, b"0123"), IntegrityError, "expected at 4"),  # again
        (chunk(4, b""), IntegrityError, "expected 1 to 6"),
        (chunk(4, b"456789A"), IntegrityError, "expected 1 to 6"),
        (chunk(4, b"4" * (MAX_CHUNK_BYTES + 1)), LimitError, "limit"),
        (flipped(4, b"456"), IntegrityError, "CRC32C"),
    ],
)
def test_bad_chunk_leaves_nothing(
    bad: tensor_pb2.Chunk, error: type[Exception], match: str
) -> None:
    target = bytearray(10)
    writer = ChunkWriter(10, memoryview(target))
    writer.write(chunk(0, b"0123"))
    with pytest.raises(error, match=match):
        writer.write(bad)
    assert writer.received == 4
    assert bytes(target) == b"0123" + bytes(6)
    writer.write(chunk(4, b"456789"))
    writer.finish()
    assert bytes(target) == b"0123456789"


def test_short_stream_is_refused_at_its_end_and_none_starts_behind_it() -> None:
    writer = ChunkWriter(10, lambda _offset, _data: None)
    writer.write(chunk(0, b"0123"))
    with pytest.raises(IntegrityError, match="after 4 of 10"):
        writer.finish()
    with pytest.raises(OutOfRangeError, match="beyond the end"):
        ChunkWriter(10, memoryview(bytearray(10)), offset=11)


@given(st.binary(max_size=300))
def test_random_bytes_never_do_more_than_refuse(data: bytes) -> None:
    with suppress(DecodeError, InvalidInputError, LimitError):
        from_proto(Message.FromString(data))
