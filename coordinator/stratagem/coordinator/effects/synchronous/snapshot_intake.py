"""Writes a snapshot into the blob store: of what the worker sends of it, and of what the blob of an
earlier one has already.

The blob is the one that all of the bytes would have made, and its SHA-256 is taken of all of them;
what comes from the earlier blob is checked as it is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from stratagem.common.base.errors import ConflictError
from stratagem.common.base.ids import Digest
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.manifest import Manifest
from stratagem.common.tensors.same_bytes import SameBytes, check_same, num_changed_bytes
from stratagem.coordinator.store.blobs.blob_store import StateWriter
from stratagem.coordinator.store.blobs.verified_file import BlobFile
from stratagem.v1 import worker_pb2

PIECE_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class BaseBlob:
    """An earlier snapshot whose bytes are here: its blob, open, and where the data start."""

    name: str
    file: BlobFile
    data_start: int
    data_bytes: int


class SnapshotIntake:
    """One snapshot on its way in; commit or abort it. After `accept`, used by one thread at a
    time."""

    def __init__(self, writer_of: Callable[[Manifest], StateWriter], base: BaseBlob | None) -> None:
        self.name = ""
        """Of the snapshot; "" where the worker gives it none."""
        self._writer_of, self._base = writer_of, base
        self._same: Sequence[SameBytes] | None = None
        self._next = 0
        """The first range of `_same` that is not written yet."""
        self._num_written = 0
        self._writer: StateWriter | None = None

    def size_of(self, first: worker_pb2.GetStateResponse, manifest: Manifest) -> int:
        """Return how many bytes the worker will send, by the first message of its stream.

        Raises ConflictError where a stream that is resumed leaves out others than before.
        """
        same = [SameBytes(each.offset, each.base_offset, each.size) for each in first.same]
        base_bytes = 0 if self._base is None else self._base.data_bytes
        check_same(same, manifest.total_bytes, base_bytes)
        if self._same is not None and (same, first.name) != (self._same, self.name):
            raise ConflictError("another part of the snapshot is left out than before")
        self._same, self.name = same, first.name
        return num_changed_bytes(same, manifest.total_bytes)

    def accept(self, manifest: Manifest) -> Callable[[bytes], None]:
        """Begin the blob; return what takes the bytes that the worker sends, in order, and none
        when all have come."""
        self._writer = self._writer_of(manifest)
        return self._write

    def commit(self) -> Digest:
        """Make the blob durable, and return its digest."""
        assert self._writer is not None
        return self._writer.commit()

    def abort(self) -> None:
        """Delete what was written; no error after a commit."""
        if self._writer is not None:
            self._writer.abort()

    def _write(self, data: bytes) -> None:
        """Write bytes that were sent, and before, between and behind them what the base has."""
        assert self._writer is not None
        view = memoryview(data)
        while True:
            until = self._copy_same()
            taken = view if until is None else view[: until - self._num_written]
            if not taken:
                return
            self._writer.write(taken)
            self._num_written += len(taken)
            view = view[len(taken) :]

    def _copy_same(self) -> int | None:
        """Write the ranges that are due; return where the next one begins."""
        assert self._writer is not None
        assert self._same is not None
        while self._next < len(self._same):
            offset, base_offset, size = self._same[self._next]
            if offset > self._num_written:
                return offset
            assert self._base is not None
            buffer = memoryview(bytearray(min(size, PIECE_BYTES)))
            for start in range(0, size, PIECE_BYTES):
                piece = buffer[: min(PIECE_BYTES, size - start)]
                self._base.file.read_into(piece, self._base.data_start + base_offset + start)
                self._writer.write(piece)
            self._num_written += size
            self._next += 1
            failpoint("coordinator.snapshot.copied")
        return None
