"""Cut the byte range of a tensor stream into checked chunks and put it together again.

The module defines the size of a chunk, its checksum and the order. A sender gives memory or a
source of pieces, a receiver a sink.

CHUNK_BYTES is measured (benchmarks/tensor_stream.py --chunks), with the allocator tuned as in
process/process.py: the fixed cost of gRPC and Python per message is a tenth of the time at 1 MiB.
It is also the largest chunk that a receiver accepts. Small ranges are cut smaller (`piece_bytes`),
so that several pieces are in transit at once, at both ends and for each stream.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Protocol

import google_crc32c

from stratagem.common.base.errors import IntegrityError, LimitError, OutOfRangeError
from stratagem.common.tensors.manifest import Purpose
from stratagem.v1 import tensor_pb2

# ---- Frames ----
#
# Messages that carry a chunk are written and read with as few copies as possible.
#
# On the wire these are the plain messages of the `.proto` files, byte for byte as protobuf writes
# them; any generated class reads and writes the same. Protobuf copies the payload three times to
# write it and twice to read it; this code copies it once to write and not at all to read. The
# checksum is taken of the copy while it is in the cache: that costs a third of a pass over the
# tensor's memory (benchmarks/tensor_stream.py). Protobuf handles every other message. The code
# relies only on the layout of `Chunk` and on its field having number 2.

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
    """Return the CRC32C of bytes in memory, without a copy of them."""
    return extended(0, data)


def extended(crc: int, data: Data) -> int:
    """Return the CRC32C of earlier bytes, given their CRC32C, followed by `data`."""
    value: int = google_crc32c.extend(crc, data if isinstance(data, bytes) else _array_of(data))
    return value


def _array_of(data: Data, size: int = -1, offset: int = 0) -> Any:
    """Return bytes as an array, because the C functions take no memoryview."""
    import numpy as np  # most processes that make calls stream nothing

    return np.frombuffer(data, np.uint8, size, offset)


def iter_frames(pieces: Iterable[Piece], offset: int = 0) -> Iterator[bytes]:
    """Yield each piece as a serialized message whose field `chunk` carries it."""
    for piece in pieces:
        parts = (piece,) if isinstance(piece, bytes | memoryview) else piece
        yield frame(offset, *parts)
        offset += sum(map(len, parts))


def frame(offset: int, *parts: Data) -> bytes:
    """Return a serialized message whose field `chunk` carries `parts`, not all of them empty."""
    size = sum(map(len, parts))
    return (patched if size >= _MIN_PATCHED_BYTES else joined)(offset, *parts)


def recut(raw: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    """Cut a frame (message with a chunk) into frames of these numbers of data bytes, and a rest."""
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
    """Return whether a frame made by `frame` from `size` bytes of data carries this CRC32C."""
    if crc:
        return raw.endswith(bytes((_CRC_TAG,)) + crc.to_bytes(4, "little"))
    return len(raw) == len(_head(offset, size, 0)) + size


def joined(offset: int, *parts: Data) -> bytes:
    """Encode a frame (message with a chunk) in plain Python, with one pass over the data for the
    checksum and one for the copy."""
    crc = 0
    for part in parts:
        crc = extended(crc, part)
    tail = bytes((_CRC_TAG,)) + crc.to_bytes(4, "little") if crc else b""
    return b"".join((_head(offset, sum(map(len, parts)), len(tail)), *parts, tail))


def patched(offset: int, *parts: Data) -> bytes:
    """Encode a frame (message with a chunk): copy the data, then compute the copy's checksum."""
    size = sum(map(len, parts))
    head = _head(offset, size, 5)
    raw = b"".join((head, *parts, _ROOM))
    crc: int = google_crc32c.value(_array_of(raw, size, len(head)))
    if crc == 0:  # protobuf omits it
        return joined(offset, *parts)
    # No other code has seen these bytes yet.
    ctypes.memmove(_address_of(raw) + len(raw) - 4, crc.to_bytes(4, "little"), 4)
    return raw


def _head(offset: int, size: int, tail_size: int) -> bytes:
    """Return the bytes of a frame, in protobuf's encoding, that come before its data."""
    inner = bytes((_OFFSET_TAG,)) + _varint(offset) if offset else b""
    inner += bytes((_DATA_TAG,)) + _varint(size)
    return bytes((_CHUNK_TAG,)) + _varint(len(inner) + size + tail_size) + inner


_address_of: Final = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = (ctypes.py_object,), ctypes.c_void_p


class ChunkFrame:
    """A received message with a chunk, decoded without protobuf; acts as the message and as its
    chunk. `data` is a view of the raw bytes. Protobuf provides all other attributes."""

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
    """Wrap the parser of a message type, so that messages with only a chunk become a ChunkFrame
    without a copy."""
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
    """Decode a message that has only a chunk, in the form that `frame` or protobuf gives it; None
    for other bytes."""
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
    """Decode a varint of up to nine bytes; return (value, end), value -1 for a longer one."""
    value = 0
    for shift in range(0, 63, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return -1, at


# ---- Chunks ----

CHUNK_BYTES: Final = 2 * 2**20
MAX_CHUNK_BYTES: Final = CHUNK_BYTES  # what a receiver takes

_MIN_PIECE_BYTES: Final = CHUNK_BYTES // 8
_PIECES_AT_LEAST: Final = 8
"""The least number of pieces into which a range is cut, unless they would be too small."""

Sink = Callable[[int, Any], None]
"""A function that consumes bytes (or a view) at an offset; offsets are in order, without gaps."""

Source = Callable[[int], Iterator[Piece]]
"""A function that yields the content from an offset on, in pieces of at most CHUNK_BYTES."""


def piece_bytes(total_bytes: int) -> int:
    """Return the piece size in which to read, send or process this many bytes: a power of two
    between 256 KiB and CHUNK_BYTES."""
    part = -(-total_bytes // _PIECES_AT_LEAST)
    return min(CHUNK_BYTES, max(_MIN_PIECE_BYTES, 1 << max(0, part - 1).bit_length()))


class CarriesChunk(Protocol):
    """A request or response message with a field `chunk`."""

    @property
    def chunk(self) -> tensor_pb2.Chunk: ...


def iter_views(
    buffers: Sequence[memoryview], offset: int = 0, piece_bytes: int = CHUNK_BYTES
) -> Iterator[list[memoryview]]:
    """Yield the concatenation of `buffers` from `offset` on in pieces, each a list of views."""
    parts: list[memoryview] = []
    room = piece_bytes
    for buffer in buffers:
        view = _as_bytes(buffer)
        start = min(offset, len(view))
        offset -= start
        while start < len(view):
            part = view[start : start + room]
            start += len(part)
            room -= len(part)
            parts.append(part)
            if room == 0:
                yield parts
                parts, room = [], piece_bytes
    if parts:
        yield parts


def from_buffers(buffers: Sequence[memoryview], piece_bytes: int = CHUNK_BYTES) -> Source:
    """Return a `Source` that reads from memory, which must not change meanwhile."""
    return lambda offset: iter_views(buffers, offset, piece_bytes)


def fill_chunk(chunk: tensor_pb2.Chunk, offset: int, piece: bytes) -> None:
    """Make `chunk`, a part of a message, carry `piece` at `offset`. It is filled in place: setting
    a whole chunk into a field would copy the payload again."""
    chunk.offset = offset
    chunk.data = piece
    chunk.crc32c = crc32c(piece)


def check_offset(offset: int, total_bytes: int) -> None:
    """Raise OutOfRangeError if an offset is beyond the end of the content."""
    if not 0 <= offset <= total_bytes:
        raise OutOfRangeError.at("offset", f"{offset} is beyond the end at {total_bytes}")


class ChunkWriter:
    """A writer of chunks to a sink, which checks the order, length and checksum of each.

    A wrong chunk raises, and neither reaches the sink nor moves the writer. `offset` > 0 continues
    a range whose beginning is already in the sink. The bytes are counted for `purpose`.
    """

    __slots__ = ("_flow", "_sink", "received", "total_bytes")

    def __init__(
        self,
        total_bytes: int,
        sink: Sink | memoryview,
        offset: int = 0,
        purpose: Purpose = Purpose.DATA,
    ) -> None:
        check_offset(offset, total_bytes)
        self.total_bytes = total_bytes
        self._flow = received(purpose)
        self.received = offset
        self._sink = into(sink) if isinstance(sink, memoryview) else sink

    @property
    def is_complete(self) -> bool:
        return self.received == self.total_bytes

    def write(self, chunk: tensor_pb2.Chunk | ChunkFrame) -> None:
        """Check one chunk and write it to the sink."""
        data = chunk.data  # each access makes a new copy
        size = len(data)
        if chunk.offset != self.received:
            raise IntegrityError(f"chunk at {chunk.offset}, expected at {self.received}")
        if size > MAX_CHUNK_BYTES:
            raise LimitError(f"chunk at {chunk.offset}: {size} bytes, limit {MAX_CHUNK_BYTES}")
        if not 0 < size <= self.total_bytes - self.received:
            rest = self.total_bytes - self.received
            raise IntegrityError(f"chunk at {chunk.offset}: {size} bytes, expected 1 to {rest}")
        if crc32c(data) != chunk.crc32c:
            raise IntegrityError(f"chunk at {chunk.offset}: wrong CRC32C")
        self._sink(self.received, data)
        self.received += size
        self._flow.num_bytes += size

    def take(self, data: Data) -> None:
        """Write the next bytes to the sink, received in another way and already checked."""
        self._sink(self.received, data)
        self.received += len(data)
        self._flow.num_bytes += len(data)

    def finish(self) -> None:
        """Raise IntegrityError if the stream has ended before all bytes came."""
        if not self.is_complete:
            raise IntegrityError(
                f"stream ended after {self.received} of {self.total_bytes} announced bytes"
            )


def into(buffer: memoryview) -> Sink:
    """Return a `Sink` that writes into a buffer."""
    view = _as_bytes(buffer)

    def write(offset: int, data: Data) -> None:
        view[offset : offset + len(data)] = data

    return write


def _as_bytes(buffer: memoryview) -> memoryview:
    if buffer.nbytes == 0:  # a shape with a zero in it cannot be cast
        return memoryview(b"")
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")


# ---- Traffic ----
#
# The process counts the bytes of tensors that it has sent and received.
#
# The counts are plain numbers of the process: one addition per chunk or message, of some 50 ns. Two
# threads that add at the same moment may lose a message, which does not matter for rates.

SENT: Final = "sent"
RECEIVED: Final = "received"


class Flow:
    """A counter of bytes sent or received, for one purpose or by one mesh engine."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        self.num_bytes = 0


_STREAMS: Final = {
    (direction, purpose): Flow() for direction in (SENT, RECEIVED) for purpose in Purpose
}
_ENGINES: Final = {
    (direction, engine): Flow()
    for direction in (SENT, RECEIVED)
    for engine in ("gloo", "nccl", "store")
}


def sent(purpose: Purpose) -> Flow:
    """Return the counter of bytes sent in tensor streams, over gRPC or on this machine."""
    return _STREAMS[SENT, purpose]


def received(purpose: Purpose) -> Flow:
    """Return the counter of bytes received in tensor streams, over gRPC or on this machine."""
    return _STREAMS[RECEIVED, purpose]


def over(engine: str, direction: str) -> Flow:
    """Return the counter of bytes over a mesh engine other than gRPC, counted at submission."""
    return _ENGINES[direction, engine]


def stream_bytes() -> Mapping[tuple[str, str], int]:
    """Return the bytes of tensor streams, keyed by (direction, purpose)."""
    return {
        (direction, purpose.name.lower()): flow.num_bytes
        for (direction, purpose), flow in _STREAMS.items()
    }


def engine_bytes() -> Mapping[tuple[str, str], int]:
    """Return the bytes keyed by (direction, mesh engine); shared memory sends nothing."""
    counted = {key: flow.num_bytes for key, flow in _ENGINES.items()}
    for direction in (SENT, RECEIVED):
        counted[direction, "grpc"] = _STREAMS[direction, Purpose.MESH].num_bytes
    return counted
