"""Stored blobs as files whose every byte is checked when it is read.

A disk can change bits under an unchanged time stamp, so that a blob was right once proves nothing.
Its digest is checked when this process first reads it, or as this process writes it; meanwhile a
checksum is taken of every chunk of its data, as the tensor stream cuts them. Who streams a chunk
computes its checksum anyway, so comparing costs nothing; other readers take whole chunks and
compare. Knows of a blob's content no more than where its data start.
"""

import io
import os
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from stratagem.common.base.errors import UnavailableError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import FileSource, header_size
from stratagem.common.tensors.local_files import offer
from stratagem.common.tensors.stream import crc32c, extended, has_crc, piece_bytes
from stratagem.v1 import tensor_pb2

_PREFIX_BYTES: Final = 8


class Sums:
    """The checksums of a blob: of the header before its data, and of each chunk of the data."""

    def __init__(self, total_bytes: int) -> None:
        """total_bytes: of the whole blob."""
        self.piece_bytes = piece_bytes(total_bytes)
        """Length of each chunk but the last."""
        self.num_bytes = 0
        self._prefix = b""
        self._data_start: int | None = None
        self._of_head = 0
        self._of_chunks = array("I")

    def add(self, data: bytes | memoryview) -> None:
        """Add the next bytes of the blob, from its first one on."""
        view = memoryview(data).cast("B")
        while view:
            if self._data_start is None:
                taken = self._begin(view)
            elif self.num_bytes < self._data_start:
                taken = view[: self._data_start - self.num_bytes]
                self._of_head = extended(self._of_head, taken)
            else:
                taken = self._add_data(view)
            self.num_bytes += len(taken)
            view = view[len(taken) :]

    def _begin(self, view: memoryview) -> memoryview:
        taken = view[: _PREFIX_BYTES - len(self._prefix)]
        self._prefix += bytes(taken)
        self._of_head = extended(self._of_head, taken)
        if len(self._prefix) == _PREFIX_BYTES:
            self._data_start = header_size(self._prefix)
        return taken

    def _add_data(self, view: memoryview) -> memoryview:
        done = (self.num_bytes - self.head_bytes) % self.piece_bytes
        taken = view[: self.piece_bytes - done]
        if done == 0:
            self._of_chunks.append(crc32c(taken))
        else:
            self._of_chunks[-1] = extended(self._of_chunks[-1], taken)
        return taken

    @property
    def head_bytes(self) -> int:
        """Return the size of the header before the data: all of a blob that is too short to have
        data."""
        return self.num_bytes if self._data_start is None else min(self._data_start, self.num_bytes)

    @property
    def data_bytes(self) -> int:
        return self.num_bytes - self.head_bytes

    def is_head(self, data: bytes) -> bool:
        """Return True if these bytes are the header before the data."""
        return len(data) == self.head_bytes and crc32c(data) == self._of_head

    @property
    def of_chunks(self) -> Sequence[int]:
        """Return the checksums of all chunks of the data."""
        return self._of_chunks

    def of_chunk(self, number: int) -> tuple[int, int]:
        """Return length and checksum of a chunk of the data."""
        size = min(self.piece_bytes, self.data_bytes - number * self.piece_bytes)
        return size, self._of_chunks[number]


class Content(Protocol):
    """The bytes of an open blob, each of them checked when it is read."""

    num_bytes: int
    is_in_leaves: bool
    """Whether the blob is a state in leaves; its digest is that of the list of them."""

    def read_into(self, view: memoryview, offset: int) -> None: ...
    def source(self, offset: int) -> Iterator[bytes]: ...
    def check(self, offset: int, frame: bytes) -> None: ...
    def offer(self) -> tensor_pb2.OpenFile | None: ...


class BlobFile(io.RawIOBase):
    """An open blob whose `read` and `read_into` check every byte.

    What differs from its checksum raises UnavailableError: the blob must be opened again, which
    looks at all of it, and finds a sound copy where there is one. The content goes with its last
    reader.
    """

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content
        self._at = 0

    @property
    def num_bytes(self) -> int:
        """Return the size of the blob."""
        return self._content.num_bytes

    @property
    def is_in_leaves(self) -> bool:
        """Return whether its digest is that of a list of leaves."""
        return self._content.is_in_leaves

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.num_bytes}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        begin, end = self._at, self.num_bytes
        if size is not None and size >= 0:
            end = min(end, begin + size)
        data = bytearray(max(0, end - begin))
        self.read_into(memoryview(data), begin)
        self._at = begin + len(data)
        return bytes(data)

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill a view with the bytes from an offset on, which the blob must have."""
        self._content.read_into(view, offset)

    def source(self) -> FileSource:
        """The data as a stream's source, also when the file is closed meanwhile. What it gives from
        the start of a chunk on is left for `check`."""
        return self._content.source

    @property
    def offer(self) -> Callable[[], tensor_pb2.OpenFile | None]:
        """Return what offers the data to a process on this machine while the content is alive; it
        gives None where they are in no one file."""
        return self._content.offer

    @property
    def check(self) -> Callable[[int, bytes], None]:
        """Return the check of a frame (see `frames`) that carries what the source gave for an
        offset."""
        return self._content.check


class FileContent:
    """The bytes of a blob that is one open file; kept alive by its readers."""

    is_in_leaves = False

    def __init__(
        self, descriptor: int, digest: Digest, sums: Sums, on_damage: Callable[[], None]
    ) -> None:
        """Take the descriptor over; on_damage is called before a difference is raised."""
        weakref.finalize(self, os.close, descriptor)
        self._descriptor, self._digest, self._sums = descriptor, digest, sums
        self._piece_bytes = sums.piece_bytes
        self._on_damage = on_damage
        self._newest: tuple[int, memoryview] = (-1, memoryview(b""))
        self.num_bytes = sums.num_bytes
        self._head = os.pread(descriptor, sums.head_bytes, 0)
        if not sums.is_head(self._head):
            self._fail()

    def read_into(self, view: memoryview, offset: int) -> None:
        done, num_head = 0, len(self._head)
        while done < len(view):
            at = offset + done
            if at < num_head:
                piece = memoryview(self._head)[at : at + len(view) - done]
            else:
                number, skipped = divmod(at - num_head, self._piece_bytes)
                piece = self._chunk(number)[skipped : skipped + len(view) - done]
            view[done : done + len(piece)] = piece
            done += len(piece)

    def _chunk(self, number: int) -> memoryview:
        """Return a chunk of the data, checked. The newest one is kept."""
        if self._newest[0] != number:
            data = self._pread(number)
            if crc32c(data) != self._sums.of_chunk(number)[1]:
                self._fail()
            self._newest = number, memoryview(data)
        return self._newest[1]

    def source(self, offset: int) -> Iterator[bytes]:
        number, skipped = divmod(offset, self._piece_bytes)
        if skipped:  # a stream that goes on inside a chunk
            yield bytes(self._chunk(number)[skipped:])
            number += 1
        while number * self._piece_bytes < self._sums.data_bytes:
            yield self._pread(number)
            number += 1

    def check(self, offset: int, frame: bytes) -> None:
        number, skipped = divmod(offset, self._piece_bytes)
        if not skipped and not has_crc(frame, offset, *self._sums.of_chunk(number)):
            self._fail()

    def offer(self) -> tensor_pb2.OpenFile:
        start, sums = len(self._head), self._sums.of_chunks
        return offer(self._descriptor, start, self._piece_bytes, sums)

    def _pread(self, number: int) -> bytes:
        size, _ = self._sums.of_chunk(number)
        data = os.pread(self._descriptor, size, len(self._head) + number * self._piece_bytes)
        if len(data) != size:
            self._fail()
        return data

    def _fail(self) -> None:
        self._on_damage()
        raise UnavailableError(f"blob {self._digest} has changed where it is stored")
