"""The interface of blob stores, wherever the blobs are stored, and the writer of a blob.

A blob appears complete and durable, or not at all; it is never changed. A blob is checked against
its digest the first time this process reads it, and everything that is read against checksums that
were taken then (verified_file.py). Unreferenced blobs are collected. All
methods may be called from any thread, and may block on a disk or a network.
"""

import hashlib
from collections.abc import Container
from pathlib import Path
from typing import Protocol

from stratagem.common.base.errors import IntegrityError, NotFoundError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.store.blobs.durable_file import (
    DurableFile,
    MakeRoom,
    no_room,
    space_needed,
)
from stratagem.coordinator.store.blobs.temporary_files import Scratch, new_temporary
from stratagem.coordinator.store.blobs.verified_file import BlobFile, Sums


class DamagedBlobError(IntegrityError):
    """The bytes of a stored blob are not those that were stored; reading it again does not help."""

    def __init__(self, digest: Digest, why: str = "its bytes have another digest") -> None:
        self.digest = digest
        super().__init__(f"blob {digest} is damaged: {why}")


class MissingBlobError(NotFoundError):
    """A blob is not in the store: it was collected, or its file was removed."""

    def __init__(self, digest: Digest) -> None:
        self.digest = digest
        super().__init__(f"blob {digest} is not in the store")


class BlobStore(Protocol):
    """Content-addressed blobs; see the module for the rules."""

    def writer(self, total_bytes: int) -> "BlobWriter":
        """Return a writer for a blob of exactly total_bytes."""

    def scratch(self) -> Scratch:
        """Return a file for bytes that will become part of a blob."""

    def open(self, digest: Digest) -> BlobFile:
        """Open the blob as a local file to read, at any offset; every read is checked.

        Raises MissingBlobError, DamagedBlobError, UnavailableError when it cannot be reached now.
        The file stays readable also when the blob is collected meanwhile.
        """

    def exists(self, digest: Digest) -> bool:
        """Return True when the blob is in the store, whole or damaged."""

    def keep(self, digest: Digest) -> bool:
        """Return True when the blob is in the store; it then counts as just written: a fact will
        name it."""

    def settle(self, digest: Digest) -> None:
        """Note that an event that names a blob is durable, reported by a writer of the blob: from
        now on the blob stays only as long as it is live, unless another writer has written it, too.
        """

    def make_room(self) -> bool:
        """Delete a local copy of a blob that is stored elsewhere, because the disk is full; False
        when there is none."""

    def keep_room(self) -> None:
        """Delete local copies of blobs that are stored elsewhere until the disk has some room for
        others."""

    def collect(self, live: Container[Digest], grace_s: float) -> list[Digest]:
        """Delete the blobs that are not in `live`, and return them.

        Spared are blobs that this process wrote less than grace_s ago, and whose event has not
        been settled: it may be on its way. What an earlier process wrote and nobody names is
        garbage at once. What a later one writes is left alone: it leads now, and this one may not
        know yet.
        """

    def location(self, digest: Digest) -> str:
        """Return the path of the blob's file, for display; "" where there is none on this
        machine."""


class Adopt(Protocol):
    """Gives a complete file its name, durably; it is moved away from `temporary`."""

    def __call__(
        self, digest: Digest, file: DurableFile, temporary: Path, sums: Sums, /
    ) -> None: ...


class StateWriter(Protocol):
    """A state that is being written into a store: write all of its data, in their order, then
    commit; or abort."""

    def write(self, data: memoryview | bytes) -> None: ...
    def commit(self) -> Digest: ...
    def abort(self) -> None: ...


def file_writer(blobs: BlobStore, manifest: Manifest) -> "BlobWriter":
    """Return a writer for the data of a state that becomes one file, whose header is written."""
    header = header_bytes(manifest)
    writer = blobs.writer(len(header) + manifest.total_bytes)
    writer.write(header)
    return writer


class BlobWriter:
    """A blob that is being written into a store: write all of it, then commit; or abort."""

    def __init__(
        self, folder: Path, total_bytes: int, adopt: Adopt, make_room: MakeRoom = no_room
    ) -> None:
        """Open a temporary file below `folder`; see the class."""
        self._adopt = adopt
        self._total_bytes = total_bytes
        with space_needed():
            self._temporary, descriptor = new_temporary(folder)
        self._file = DurableFile(descriptor, make_room)
        self._sha256 = hashlib.sha256()
        self._sums = Sums(total_bytes)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes written so far."""
        return self._file.num_bytes

    @property
    def digest(self) -> Digest:
        """Return the digest of the bytes written so far."""
        return Digest(self._sha256.hexdigest())

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes; the buffer is free for reuse afterwards. Any error aborts the blob."""
        try:
            if self._file.num_bytes + memoryview(data).nbytes > self._total_bytes:
                raise IntegrityError(f"more than the announced {self._total_bytes} bytes")
            self._file.write(data)
            self._sha256.update(data)
            self._sums.add(data)
        except BaseException:
            self.abort()
            raise

    def commit(self) -> Digest:
        """Make the blob durable and visible, and return the digest of its bytes, which is its
        name."""
        try:
            if self._file.num_bytes != self._total_bytes:
                raise IntegrityError(
                    f"{self._file.num_bytes} of the announced {self._total_bytes} bytes"
                )
            digest = self.digest
            with space_needed():
                self._adopt(digest, self._file, self._temporary, self._sums)
        except BaseException:
            self.abort()
            raise
        self._file.close()
        return digest

    def abort(self) -> None:
        """Delete what was written; no error after a commit or an earlier abort."""
        if self._file.descriptor >= 0:
            self._temporary.unlink(missing_ok=True)
            self._file.close()
