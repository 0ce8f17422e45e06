"""Messages that carry a chunk, written and read with as few copies as possible.

On the wire these are the plain messages of the `.proto` files, byte for byte as protobuf writes
them; any generated class reads and writes the same. Protobuf copies the payload three times to
write it and twice to read it; this copies it once to write and not at all to read. The checksum is
taken of the copy while it is in the cache: that costs a third of a pass over the tensor's memory
(benchmarks/tensor_stream.py). Everything that is not exactly such a message is left to protobuf.
Knows only the layout of `Chunk` and that its field is number 2.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

import google_crc32c
import numpy as np

from stratagem.v1 import tensor_pb2

Data = bytes | memoryview
Piece = Data | Sequence[Data]
"""The bytes of one chunk, in one buffer or in several."""

_CHUNK_TAG: Final = 0x12  # field 2 of the carrier, length-delimited
_OFFSET_TAG: Final = 0x08  # fields of Chunk: 1, varint
_DATA_TAG: Final = 0x12  # 2, length-delimited
_CRC_TAG: Final = 0x1D  # 3, fixed32
_MIN_BYTES: Final = 4096  # below, protobuf is as good
_MIN_PATCHED_BYTES: Final = 2**16  # below, joining is as good
_ROOM: Final = bytes((_CRC_TAG, 0, 0, 0, 0))


def crc32c(data: Data) -> int:
    """CRC32C of bytes in memory, without a copy of them."""
    return extended(0, data)


def extended(crc: int, data: Data) -> int:
    """The CRC32C of what has the one given, with `data` behind it."""
    # The C function takes no memoryview, but it takes an array.
    value: int = google_crc32c.extend(
        crc, data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)
    )
    return value


def iter_frames(pieces: Iterable[Piece], offset: int = 0) -> Iterator[bytes]:
    """Each piece as a serialized message whose field `chunk` carries it."""
    for piece in pieces:
        parts = (piece,) if isinstance(piece, bytes | memoryview) else piece
        yield frame(offset, *parts)
        offset += sum(map(len, parts))


def frame(offset: int, *parts: Data) -> bytes:
    """Return one serialized message whose field `chunk` carries `parts`, which must not all be
    empty."""
    size = sum(map(len, parts))
    return (patched if size >= _MIN_PATCHED_BYTES else joined)(offset, *parts)


def recut(raw: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    """Yield what a frame carries as frames of these sizes, and one of what is left."""
    whole = None if len(raw) < _MIN_BYTES else _unframed(raw, tensor_pb2.Chunk.FromString)
    if whole is None:
        yield raw
        return
    begin, num_bytes = 0, len(whole.data)
    for size in chain(sizes, (num_bytes,)):
        if begin == num_bytes:
            return
        end = min(begin + size, num_bytes)
        yield frame(whole.offset + begin, whole.data[begin:end])
        begin = end


def has_crc(raw: bytes, offset: int, size: int, crc: int) -> bool:
    """Return whether a frame of `size` bytes of data, as `frame` makes it, carries this
    checksum."""
    if crc:
        return raw.endswith(bytes((_CRC_TAG,)) + crc.to_bytes(4, "little"))
    return len(raw) == len(_head(offset, size, 0)) + size


def joined(offset: int, *parts: Data) -> bytes:
    """The frame in plain Python: a pass over the data for the checksum, and one that copies."""
    crc = 0
    for part in parts:
        crc = extended(crc, part)
    tail = bytes((_CRC_TAG,)) + crc.to_bytes(4, "little") if crc else b""
    return b"".join((_head(offset, sum(map(len, parts)), len(tail)), *parts, tail))


def patched(offset: int, *parts: Data) -> bytes:
    """The frame, copied first; the checksum is taken of the copy and put into its place."""
    size = sum(map(len, parts))
    head = _head(offset, size, 5)
    raw = b"".join((head, *parts, _ROOM))
    crc: int = google_crc32c.value(np.frombuffer(raw, np.uint8, size, len(head)))
    if crc == 0:  # is left out of the message
        return joined(offset, *parts)
    # No other code has seen these bytes yet.
    ctypes.memmove(_address_of(raw) + len(raw) - 4, crc.to_bytes(4, "little"), 4)
    return raw


def _head(offset: int, size: int, tail_size: int) -> bytes:
    """Return the bytes of a frame that precede its data."""
    inner = bytes((_OFFSET_TAG,)) + _varint(offset) if offset else b""
    inner += bytes((_DATA_TAG,)) + _varint(size)
    return bytes((_CHUNK_TAG,)) + _varint(len(inner) + size + tail_size) + inner


_address_of: Final = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = (ctypes.py_object,), ctypes.c_void_p


class ChunkFrame:
    """A received message that carries a chunk; stands in for the message and for its chunk.

    `data` is a view of the message. Whatever else is asked of it is answered by protobuf.
    """

    __slots__ = ("_parse", "_raw", "crc32c", "data", "offset")

    def __init__(
        self, raw: bytes, parse: Callable[[bytes], Any], offset: int, data: memoryview, crc: int
    ) -> None:
        self._raw, self._parse = raw, parse
        self.offset, self.data, self.crc32c = offset, data, crc

    @property
    def chunk(self) -> "ChunkFrame":
        return self

    def WhichOneof(self, _group: str) -> str:
        return "chunk"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parse(self._raw), name)


def reading_frames(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The deserializer of a message type; those with a chunk come as ChunkFrame where possible."""
    descriptor = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)
    field = descriptor.fields_by_name.get("chunk") if descriptor else None
    if (
        field is None
        or field.number != 2
        or field.containing_oneof is None
        or field.message_type is not tensor_pb2.Chunk.DESCRIPTOR
    ):
        return parse

    def read(raw: bytes) -> Any:
        if len(raw) < _MIN_BYTES or raw[0] != _CHUNK_TAG:
            return parse(raw)
        return _unframed(raw, parse) or parse(raw)

    return read


def _unframed(raw: bytes, parse: Callable[[bytes], Any]) -> ChunkFrame | None:
    """The frame, if `raw` is what `frame` or protobuf would make of one chunk and nothing else."""
    size, at = _read_varint(raw, 1)
    if size != len(raw) - at:
        return None
    offset = 0
    if raw[at] == _OFFSET_TAG:
        offset, at = _read_varint(raw, at + 1)
    if offset < 0 or raw[at] != _DATA_TAG:
        return None
    size, at = _read_varint(raw, at + 1)
    end = at + size
    if len(raw) != end + 5 or raw[end] != _CRC_TAG:
        return None  # no checksum, or more than one chunk
    data = memoryview(raw)[at:end]
    return ChunkFrame(raw, parse, offset, data, int.from_bytes(raw[end + 1 :], "little"))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """A varint of at most nine bytes, and where it ends; -1 for a longer one."""
    value = 0
    for shift in range(0, 63, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return -1, at
