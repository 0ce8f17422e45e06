"""Messages that carry a chunk, written and read with as few copies as possible.

On the wire these are the plain messages of the `.proto` files, byte for byte as protobuf writes
them; any generated class reads and writes the same. Protobuf copies the payload three times to
write it and twice to read it; this copies it once to write and not at all to read. The checksum is
taken of the copy while it is in the cache: that costs a third of a pass over the tensor's memory
(benchmarks/tensor_stream.py). Everything that is not exactly such a message is left to protobuf.
Knows only the layout of `Chunk` and that its field is number 2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import google_crc32c
import numpy as np
import numpy.typing as npt

from stratagem.v1 import tensor_pb2

Data = bytes | memoryview

_CHUNK_TAG: Final = 0x12  # field 2 of the carrier, length-delimited
_OFFSET_TAG: Final = 0x08  # fields of Chunk: 1, varint
_DATA_TAG: Final = 0x12  # 2, length-delimited
_CRC_TAG: Final = 0x1D  # 3, fixed32
_MIN_BYTES: Final = 4096  # below, protobuf is as good
_MIN_FILLED_BYTES: Final = 2**16  # below, joining is as good
_BLOCK_BYTES: Final = 2**18  # is in the cache of a core after it was copied


def crc32c(data: Data) -> int:
    """CRC32C of bytes in memory, without a copy of them."""
    # The C function takes no memoryview, but it takes an array.
    value: int = google_crc32c.value(
        data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)
    )
    return value


def iter_frames(pieces: Iterable[Data], offset: int = 0) -> Iterator[bytes]:
    """Each piece as a serialized message whose field `chunk` carries it."""
    for piece in pieces:
        yield frame(offset, piece)
        offset += len(piece)


def frame(offset: int, data: Data) -> bytes:
    """One serialized message whose field `chunk` carries `data`, which must not be empty."""
    return (filled if len(data) >= _MIN_FILLED_BYTES else joined)(offset, data)


def joined(offset: int, data: Data) -> bytes:
    """The frame in plain Python: a pass over `data` for the checksum, and one that copies."""
    crc = crc32c(data)
    tail = bytes((_CRC_TAG,)) + crc.to_bytes(4, "little") if crc else b""
    return b"".join((_head(offset, len(data), len(tail)), data, tail))


def filled(offset: int, data: Data) -> bytes:
    """The frame, written into its place block by block, each block's checksum taken of the copy."""
    head = _head(offset, len(data), 5)
    end = len(head) + len(data)
    raw, message = _new_bytes(end + 5)
    message[: len(head)] = np.frombuffer(head, np.uint8)
    source, copy = np.frombuffer(data, np.uint8), message[len(head) : end]
    crc = 0
    for start in range(0, len(data), _BLOCK_BYTES):
        block = copy[start : start + _BLOCK_BYTES]
        block[:] = source[start : start + _BLOCK_BYTES]
        crc = google_crc32c.extend(crc, block)
    if crc == 0:  # is left out of the message
        return joined(offset, data)
    message[end] = _CRC_TAG
    message[end + 1 :] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
    return raw


def _head(offset: int, size: int, tail_size: int) -> bytes:
    """What stands before the data of a frame."""
    inner = bytes((_OFFSET_TAG,)) + _varint(offset) if offset else b""
    inner += bytes((_DATA_TAG,)) + _varint(size)
    return bytes((_CHUNK_TAG,)) + _varint(len(inner) + size + tail_size) + inner


# The C interface of Python makes bytes to be filled in by whoever has just made them.
_bytes_of_size: Final = ctypes.pythonapi.PyBytes_FromStringAndSize
_bytes_of_size.argtypes, _bytes_of_size.restype = (
    (ctypes.c_void_p, ctypes.c_ssize_t),
    ctypes.py_object,
)
_address_of: Final = ctypes.pythonapi.PyBytes_AsString
_address_of.argtypes, _address_of.restype = (ctypes.py_object,), ctypes.c_void_p


def _new_bytes(size: int) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """New bytes, and their memory to be written before anybody else sees them."""
    raw: bytes = _bytes_of_size(None, size)
    memory = (ctypes.c_ubyte * size).from_address(_address_of(raw))
    return raw, np.frombuffer(memoryview(memory), np.uint8)


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
    def chunk(self) -> ChunkFrame:
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
