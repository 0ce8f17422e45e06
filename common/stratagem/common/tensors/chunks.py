"""The byte range of a tensor stream, cut into checked chunks and put together again.

Owns the size of a chunk, its checksum and the order. Must not know where bytes come from or go to:
a sender gives memory or a source of pieces, a receiver gives a sink.

CHUNK_BYTES is measured (benchmarks/tensor_stream.py --chunks), with the allocator tuned as in
`malloc.py`: what gRPC and Python do once per message is a tenth of the time at 1 MiB. It is also
the most that a receiver takes. Small ranges are cut smaller (`piece_bytes`): several pieces are on
their way at once, at both ends and for each stream.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from stratagem.common.base.errors import IntegrityError, LimitError, OutOfRangeError
from stratagem.common.tensors.frames import ChunkFrame, Data, Piece, crc32c
from stratagem.common.tensors.manifest import Purpose
from stratagem.common.tensors.traffic import received
from stratagem.v1 import tensor_pb2

CHUNK_BYTES: Final = 2 * 2**20
MAX_CHUNK_BYTES: Final = CHUNK_BYTES  # what a receiver takes

_MIN_PIECE_BYTES: Final = CHUNK_BYTES // 8
_PIECES_AT_LEAST: Final = 8
"""Pieces of a range, unless they would be small ones: a few of them take less than the range."""

Sink = Callable[[int, Any], None]
"""Takes the bytes (or a view of bytes) at an offset; offsets come in order and without gaps."""

Source = Callable[[int], Iterator[Piece]]
"""Gives the range from an offset on, in pieces of at most CHUNK_BYTES."""


def piece_bytes(total_bytes: int) -> int:
    """Return in how large pieces a range of so many bytes is read, sent or worked on: a power of
    two between 256 KiB and CHUNK_BYTES."""
    part = -(-total_bytes // _PIECES_AT_LEAST)
    return min(CHUNK_BYTES, max(_MIN_PIECE_BYTES, 1 << max(0, part - 1).bit_length()))


class CarriesChunk(Protocol):
    """A request or response with a field `chunk`."""

    @property
    def chunk(self) -> tensor_pb2.Chunk: ...


def iter_views(
    buffers: Sequence[memoryview], offset: int = 0, piece_bytes: int = CHUNK_BYTES
) -> Iterator[list[memoryview]]:
    """The concatenation of `buffers` from `offset` on, in pieces: each as views of the buffers that
    it is part of."""
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
    """A source that reads memory; the memory must not change while it is read."""
    return lambda offset: iter_views(buffers, offset, piece_bytes)


def fill_chunk(chunk: tensor_pb2.Chunk, offset: int, piece: bytes) -> None:
    """Make `chunk`, a part of a message, the one that carries `piece` at `offset`.

    It is filled in place: setting a whole chunk into a field would copy the payload again.
    """
    chunk.offset = offset
    chunk.data = piece
    chunk.crc32c = crc32c(piece)


def check_offset(offset: int, total_bytes: int) -> None:
    """Refuse to start reading beyond the end."""
    if not 0 <= offset <= total_bytes:
        raise OutOfRangeError.at("offset", f"{offset} is beyond the end at {total_bytes}")


class ChunkWriter:
    """Writes chunks to a sink after checking order, length and checksum of each.

    A chunk that fails raises and reaches the sink in no part; the writer then still stands where it
    stood. `offset` > 0 continues a range whose beginning is already in the sink. `purpose` says as
    what the bytes count.
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
        """Check one chunk and pass it on."""
        data = chunk.data  # each access makes a new copy
        size = len(data)
        if chunk.offset != self.received:
            raise IntegrityError(f"chunk at {chunk.offset}, expected at {self.received}")
        if size > MAX_CHUNK_BYTES:
            raise LimitError(f"chunk at {chunk.offset}: {size} bytes, limit {MAX_CHUNK_BYTES}")
        if not 0 < size <= self.total_bytes - self.received:
            left = self.total_bytes - self.received
            raise IntegrityError(f"chunk at {chunk.offset}: {size} bytes, expected 1 to {left}")
        if crc32c(data) != chunk.crc32c:
            raise IntegrityError(f"chunk at {chunk.offset}: wrong CRC32C")
        self._sink(self.received, data)
        self.received += size
        self._flow.num_bytes += size

    def take(self, data: Data) -> None:
        """Pass on the next bytes, which have come by another way and are checked."""
        self._sink(self.received, data)
        self.received += len(data)
        self._flow.num_bytes += len(data)

    def finish(self) -> None:
        """Say that the stream has ended; raises when bytes are missing."""
        if not self.is_complete:
            raise IntegrityError(
                f"stream ended after {self.received} of {self.total_bytes} announced bytes"
            )


def into(buffer: memoryview) -> Sink:
    """A sink that writes into memory."""
    view = _as_bytes(buffer)

    def write(offset: int, data: Data) -> None:
        view[offset : offset + len(data)] = data

    return write


def _as_bytes(buffer: memoryview) -> memoryview:
    if buffer.nbytes == 0:  # a shape with a zero in it cannot be cast
        return memoryview(b"")
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
