"""Content-addressed blobs: root/aa/<digest>.safetensors.

A blob appears under its name complete and durable, or not at all; it is never changed. Everything
read is checked against its digest the first time this process reads it. Unreferenced blobs are
collected. Knows nothing of runs. All methods may be called from any thread.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from stratagem.common.errors import IntegrityError, InvalidInputError, NotFoundError
from stratagem.common.failpoints import failpoint
from stratagem.common.ids import Digest
from stratagem.coordinator.blobs.durable import (
    DurableFile,
    make_folder,
    open_regular,
    pieces,
    space_needed,
    sync_folder,
)

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SUFFIX: Final = ".safetensors"
_Identity = tuple[int, int, int]  # inode, size, time of change


class BlobStore:
    """The blobs under one folder, which is made if absent. See the module for the rules."""

    def __init__(self, root: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._temporary = root / "tmp"
        self._monotonic = monotonic
        self._verified: dict[Digest, _Identity] = {}
        self._written_s: dict[Digest, float] = {}
        self._lock = threading.Lock()  # a blob is not collected while it is being named
        root.parent.mkdir(parents=True, exist_ok=True)
        make_folder(root)
        make_folder(self._temporary)
        for path in self._temporary.iterdir():
            _remove_if_abandoned(path)

    def writer(self, total_bytes: int) -> BlobWriter:
        """A writer for a blob of exactly total_bytes."""
        return BlobWriter(self, self._temporary, total_bytes)

    def scratch(self) -> Scratch:
        """A file for bytes that will become part of a blob."""
        return Scratch(self._temporary)

    def open(self, digest: Digest) -> BinaryIO:
        """The blob as a file to read. Raises NotFoundError, or IntegrityError when it is damaged.

        The file stays readable also when the blob is collected meanwhile.
        """
        try:
            descriptor = open_regular(self.path(digest))
        except FileNotFoundError:  # collected since the line above
            raise NotFoundError(f"blob {digest} is not in the store") from None
        file = os.fdopen(descriptor, "rb", buffering=0)
        try:
            self._verify(digest, descriptor)
        except BaseException:
            file.close()
            raise
        return file

    def path(self, digest: Digest) -> Path:
        """Where the blob lies; not verified. Raises NotFoundError."""
        if not self.exists(digest):
            raise NotFoundError(f"blob {digest} is not in the store")
        return self._path(digest)

    def exists(self, digest: Digest) -> bool:
        """True when the blob is in the store, whole or damaged."""
        path = self._path(digest)
        return path.is_file() and not path.is_symlink() and not path.parent.is_symlink()

    def collect(self, live: Collection[Digest], grace_s: float) -> list[Digest]:
        """Delete the blobs that are not in `live`, and return them.

        Spared are blobs that this process wrote less than grace_s ago: the event that names them
        may be on its way. What an earlier process wrote and nobody names is garbage at once.
        """
        collected = []
        for digest in self._digests():
            if digest not in live and self._delete(digest, grace_s):
                collected.append(digest)
        return collected

    def _digests(self) -> Iterator[Digest]:
        for folder in sorted(self._root.glob("[0-9a-f][0-9a-f]")):
            for path in sorted(folder.glob(f"*{_SUFFIX}")):
                if _DIGEST.fullmatch(path.stem):
                    yield Digest(path.stem)

    def _delete(self, digest: Digest, grace_s: float) -> bool:
        with self._lock:
            written_s = self._written_s.get(digest)
            if written_s is not None and self._monotonic() - written_s < grace_s:
                return False
            self._path(digest).unlink(missing_ok=True)
            self._written_s.pop(digest, None)
            self._verified.pop(digest, None)
            return True

    def _path(self, digest: Digest) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise InvalidInputError.at("digest", f"{digest!r} is not 64 of 0-9, a-f")
        return self._root / digest[:2] / f"{digest}{_SUFFIX}"

    def _verify(self, digest: Digest, descriptor: int) -> None:
        identity = _identity(descriptor)
        if self._verified.get(digest) == identity:
            return
        found = hashlib.sha256()
        for piece in pieces(descriptor, os.fstat(descriptor).st_size):
            found.update(piece)
        if found.hexdigest() != digest:
            raise IntegrityError(f"blob {digest} is damaged: its bytes have another digest")
        self._verified[digest] = identity

    def _adopt(self, digest: Digest, file: DurableFile, temporary: Path) -> None:
        """Give a complete, synced file its name. One of the same name is replaced by its equal."""
        path = self._path(digest)
        with self._lock:
            make_folder(path.parent)
            failpoint("coordinator.blobs.before_rename")
            temporary.rename(path)
            sync_folder(path.parent)
            failpoint("coordinator.blobs.after_rename")
            self._written_s[digest] = self._monotonic()
            self._verified[digest] = _identity(file.descriptor)


class BlobWriter:
    """A blob on its way into the store: write all of it, then commit; or abort."""

    def __init__(self, store: BlobStore, folder: Path, total_bytes: int) -> None:
        self._store = store
        self._total_bytes = total_bytes
        with space_needed():
            self._temporary, descriptor = _new_temporary(folder)
        self._file = DurableFile(descriptor)
        self._sha256 = hashlib.sha256()

    @property
    def num_bytes(self) -> int:
        """How much has been written."""
        return self._file.num_bytes

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes; the buffer is free for reuse afterwards. Any error aborts the blob."""
        try:
            if self._file.num_bytes + memoryview(data).nbytes > self._total_bytes:
                raise IntegrityError(f"more than the announced {self._total_bytes} bytes")
            self._file.write(data)
            self._sha256.update(data)
        except BaseException:
            self.abort()
            raise

    def commit(self) -> Digest:
        """Make the blob durable and visible; what it is called is the digest of its bytes."""
        try:
            if self._file.num_bytes != self._total_bytes:
                raise IntegrityError(
                    f"{self._file.num_bytes} of the announced {self._total_bytes} bytes"
                )
            self._file.sync()
            digest = Digest(self._sha256.hexdigest())
            with space_needed():
                self._store._adopt(digest, self._file, self._temporary)
        except BaseException:
            self.abort()
            raise
        self._file.close()
        return digest

    def abort(self) -> None:
        """Forget what was written; no error after an end of any kind."""
        if self._file.descriptor >= 0:
            self._temporary.unlink(missing_ok=True)
            self._file.close()


class Scratch:
    """Bytes on their way into a blob, to be read in another order than they came. Not durable."""

    def __init__(self, folder: Path) -> None:
        with space_needed():
            self._temporary, self._descriptor = _new_temporary(folder)

    def write(self, data: memoryview | bytes) -> None:
        """Append bytes. Raises UnavailableError when the disk is full."""
        view = memoryview(data).cast("B")
        with space_needed():
            while view:
                view = view[os.write(self._descriptor, view) :]

    def read(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        """A range of what was written, in pieces that share one buffer."""
        yield from pieces(self._descriptor, num_bytes, offset)

    def close(self) -> None:
        """Forget what was written; no error after the first time."""
        if self._descriptor >= 0:
            self._temporary.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _new_temporary(folder: Path) -> tuple[Path, int]:
    """A new file, locked: the lock says that its writer lives, whatever process that is."""
    while True:
        path = folder / secrets.token_hex(8)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # else a cleaner came between the two calls
            return path, descriptor
        os.close(descriptor)


def _remove_if_abandoned(path: Path) -> None:
    """Remove a temporary file whose writer is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _identity(descriptor: int) -> _Identity:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns
