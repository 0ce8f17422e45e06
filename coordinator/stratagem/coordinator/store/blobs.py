"""The interface of blob stores, and its implementation as files in one folder.

A blob appears complete and durable, or not at all; it is never changed. The first time this process
reads a blob, it checks it against its digest; later reads are checked against checksums that were
taken then (files.py). Unreferenced blobs are collected. All methods may be called from any thread,
and may block on a disk or a network.
"""

import errno
import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StaleError,
)
from stratagem.common.base.ids import Digest
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.files import header_bytes
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.store.files import (
    BlobFile,
    DurableFile,
    FileContent,
    MakeRoom,
    Scratch,
    Sums,
    make_folder,
    new_temporary,
    no_room,
    open_regular,
    pieces,
    remove_if_abandoned,
    space_needed,
    sync_folder,
)

# ---- Interface ----


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
    """A store of content-addressed blobs; see the module for the rules."""

    def writer(self, total_bytes: int) -> "BlobWriter":
        """Return a writer for a blob of exactly total_bytes."""

    def scratch(self) -> Scratch:
        """Return a scratch file for bytes that will become part of a blob."""

    def open(self, digest: Digest) -> BlobFile:
        """Open the blob as a local file, for reads at any offset; every read is checked.

        Raises MissingBlobError, DamagedBlobError, or UnavailableError if the store cannot be
        reached now. The open file stays readable even if the blob is collected meanwhile.
        """

    def exists(self, digest: Digest) -> bool:
        """Return True if the blob is in the store, whole or damaged."""

    def keep(self, digest: Digest) -> bool:
        """Protect the blob from collection until a fact names it, as if just written; return False
        if it is missing."""

    def settle(self, digest: Digest) -> None:
        """Drop one claim on a blob, because the event that names it is durable. From then on the
        blob stays only while it is live, unless another writer has claimed it, too."""

    def make_room(self) -> bool:
        """Delete a local copy of a remote blob to free disk space; False if there is none."""

    def keep_room(self) -> None:
        """Delete local copies of remote blobs until the disk has some free space again."""

    def collect(self, live: Container[Digest], grace_s: float) -> list[Digest]:
        """Delete the blobs that are not in `live`, and return their digests.

        Blobs that this process wrote less than grace_s ago are spared while their event may still
        come. Unreferenced blobs of an earlier process are garbage at once. Blobs of a later process
        stay: it leads now, and this process may not know yet.
        """

    def location(self, digest: Digest) -> str:
        """Return the path of the blob's file, for display; "" if none is on this machine."""


Adopt = Callable[[Digest, DurableFile, Path, Sums], None]
"""Gives a complete temporary file its final name, durably."""


class StateWriter(Protocol):
    """Writes one state into a store: write all of its data in order, then commit; or abort."""

    def write(self, data: memoryview | bytes) -> None: ...
    def commit(self) -> Digest: ...
    def abort(self) -> None: ...


def file_writer(blobs: BlobStore, manifest: Manifest) -> "BlobWriter":
    """Return a writer for the data of a state stored as one file; the header is written already."""
    header = header_bytes(manifest)
    writer = blobs.writer(len(header) + manifest.total_bytes)
    writer.write(header)
    return writer


class BlobWriter:
    """Writes one blob into a store: write all of it, then commit; or abort."""

    def __init__(
        self, folder: Path, total_bytes: int, adopt: Adopt, make_room: MakeRoom = no_room
    ) -> None:
        """Open a temporary file below `folder`. adopt: gives the file its final name. make_room:
        called on a full disk."""
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
        """Append bytes; the buffer may be reused afterwards. Any error aborts the blob."""
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
        """Make the blob durable and visible, and return its digest."""
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
        """Delete what was written; do nothing after a commit or an earlier abort."""
        if self._file.descriptor >= 0:
            self._temporary.unlink(missing_ok=True)
            self._file.close()


# ---- Blobs in a folder ----
#
# Blobs are files under one folder: root/aa/<digest>.safetensors.
#
# Collecting moves a blob into a bin, root/bins/<token>. Each opening has a bin of its own and
# removes all others. A coordinator that was frozen and replaced therefore finds, wherever it
# stopped, that it can no longer collect, since its successor may have stored the same bytes
# again.

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
SUFFIX: Final = ".safetensors"
_Identity = tuple[int, int, int]  # inode, size, time of change


@dataclass(frozen=True, slots=True)
class Stored:
    """The file of a stored blob: its size, and the time of its last use."""

    digest: Digest
    num_bytes: int
    used_ns: int


class DirectoryBlobs:
    """A blob store in one folder, which is made if absent. See the module for the rules."""

    def __init__(
        self,
        root: Path,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        is_durable: bool = True,
        make_room: MakeRoom = no_room,
        suffix: str = SUFFIX,
    ) -> None:
        """Open the folder. is_durable: blobs survive a power cut; not needed for mere copies.
        make_room: called on a full disk. suffix: the suffix of the file names."""
        self._root = root
        self._suffix = suffix
        self._is_durable = is_durable
        self.make_room = make_room
        self._temporary = root / "tmp"
        self._verified: dict[Digest, tuple[_Identity, Sums]] = {}
        self._claims = Claims(monotonic)
        self._present: set[Digest] | None = None
        """The digests of all blobs, once listed: listing all folders takes some milliseconds, as
        long as writing a small state."""
        self._lock = threading.Lock()  # a blob is not collected while it is being named
        root.parent.mkdir(parents=True, exist_ok=True)
        make_folder(root)
        make_folder(self._temporary)
        for path in self._temporary.iterdir():
            remove_if_abandoned(path)
        self._bin = Bin(root / "bins", root)

    def writer(self, total_bytes: int, adopt: Adopt | None = None) -> BlobWriter:
        """Return a writer for a blob of exactly total_bytes, whose commit calls `adopt`, by default
        the store's own, to name the complete file."""
        return BlobWriter(self._temporary, total_bytes, adopt or self.adopt, self.make_room)

    def scratch(self) -> Scratch:
        return Scratch(self._temporary, self.make_room)

    def keep_room(self) -> None:
        """Do nothing: no blob here is a mere copy that may be deleted."""

    def open(self, digest: Digest) -> BlobFile:
        try:
            descriptor = open_regular(self.path(digest))
        except FileNotFoundError:  # collected since the line above
            raise MissingBlobError(digest) from None
        try:
            sums = self._verify(digest, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return self.opened(digest, descriptor, sums)

    def opened(self, digest: Digest, descriptor: int, sums: Sums) -> BlobFile:
        """Return the blob of a file that is open and verified, and take over the descriptor."""
        return BlobFile(FileContent(descriptor, digest, sums, lambda: self._distrust(digest)))

    def _distrust(self, digest: Digest) -> None:
        """Have the next `open` verify the whole blob: a read gave bytes other than those stored."""
        with self._lock:
            self._verified.pop(digest, None)

    def path(self, digest: Digest) -> Path:
        """Return the path of the blob's file, unverified. Raises NotFoundError."""
        if not self.exists(digest):
            raise MissingBlobError(digest)
        return self._path(digest)

    def exists(self, digest: Digest) -> bool:
        path = self._path(digest)
        return path.is_file() and not path.is_symlink() and not path.parent.is_symlink()

    def keep(self, digest: Digest) -> bool:
        with self._lock:
            if not self.exists(digest):
                return False
            self._claims.add(digest)
            return True

    def settle(self, digest: Digest) -> None:
        with self._lock:
            self._claims.settle(digest)

    def location(self, digest: Digest) -> str:
        """Return the path of the blob's file; "" when it is not in the store."""
        return str(self._path(digest).resolve()) if self.exists(digest) else ""

    def collect(self, live: Container[Digest], grace_s: float) -> list[Digest]:
        """Delete the blobs that are not in `live`, and return their digests; see BlobStore.

        Raises StaleError if another coordinator has opened the folder since.
        """
        with self._lock:
            if self._present is None:
                self._present = set(self.digests())
            present = self._present.copy()
        garbage = sorted(digest for digest in present if digest not in live)
        return [digest for digest in garbage if self._delete(digest, grace_s)]

    def adopt(self, digest: Digest, file: DurableFile, temporary: Path, sums: Sums) -> None:
        """Give a complete file its final name, replacing an equal blob of that name."""
        if self._is_durable:
            file.sync()
        path = self._path(digest)
        with self._lock:
            make_folder(path.parent)
            # After an error here the next collection lists the folders.
            present, self._present = self._present, None
            failpoint("coordinator.blobs.before_rename")
            temporary.rename(path)
            if self._is_durable:
                sync_folder(path.parent)
            failpoint("coordinator.blobs.after_rename")
            self._claims.add(digest)
            self._verified[digest] = _identity(file.descriptor), sums
            self._present = present
            if present is not None:
                present.add(digest)

    def drop(self, digest: Digest) -> None:
        """Delete a blob, if present; readers that have it open can continue."""
        with self._lock:
            self._path(digest).unlink(missing_ok=True)
            self._forget(digest)

    def touch(self, digest: Digest) -> None:
        """Record that the blob is used now; `stored` reports this even after a restart."""
        with suppress(FileNotFoundError):
            modified_ns = self._path(digest).stat().st_mtime_ns
            os.utime(self._path(digest), ns=(time.time_ns(), modified_ns))

    def stored(self) -> list[Stored]:
        """Return all stored blobs, unverified."""
        blobs = []
        for digest in self.digests():
            with suppress(FileNotFoundError):
                status = self._path(digest).stat()
                blobs.append(Stored(digest, status.st_size, status.st_atime_ns))
        return blobs

    def digests(self) -> Iterator[Digest]:
        """Yield the digests of all blobs in the store."""
        for folder in sorted(self._root.glob("[0-9a-f][0-9a-f]")):
            for path in sorted(folder.glob(f"*{self._suffix}")):
                if _DIGEST.fullmatch(path.stem):
                    yield Digest(path.stem)

    def _delete(self, digest: Digest, grace_s: float) -> bool:
        with self._lock:
            if self._claims.hold(digest, grace_s):
                return False
            self._bin.discard(self._path(digest))
            self._forget(digest)
            return True

    def _forget(self, digest: Digest) -> None:
        self._claims.forget(digest)
        self._verified.pop(digest, None)
        if self._present is not None:
            self._present.discard(digest)

    def _path(self, digest: Digest) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise InvalidInputError.at("digest", f"{digest!r} is not 64 of 0-9, a-f")
        return self._root / digest[:2] / f"{digest}{self._suffix}"

    def _verify(self, digest: Digest, descriptor: int) -> Sums:
        """Return the checksums of a blob that matches its digest; an unchanged file is not read
        again."""
        identity = _identity(descriptor)
        verified = self._verified.get(digest)
        if verified is not None and verified[0] == identity:
            return verified[1]
        num_bytes = os.fstat(descriptor).st_size
        hasher, sums = hashlib.sha256(), Sums(num_bytes)
        for piece in pieces(descriptor, num_bytes):
            hasher.update(piece)
            sums.add(piece)
        if hasher.hexdigest() != digest:
            raise DamagedBlobError(digest)
        self._verified[digest] = identity, sums
        return sums


class Bin:
    """The folder through which files are deleted: each opening of the store makes its own bin, and
    removes older ones."""

    def __init__(self, bins: Path, root: Path) -> None:
        """Remove all other bins and make a new one. root: the store's folder, for errors."""
        self._root = root
        make_folder(bins)
        for other in bins.iterdir():
            while other.is_dir():
                with suppress(FileNotFoundError):  # another process opens the folder, too
                    _remove(other)
        self._path = bins / secrets.token_hex(8)
        make_folder(self._path)

    def discard(self, path: Path) -> None:
        """Delete a file by moving it into the bin. Raises StaleError if another coordinator has
        opened the store and removed the bin: the file may be the successor's."""
        discarded = self._path / path.name
        try:
            path.rename(discarded)
        except FileNotFoundError:
            if not self._path.is_dir():
                raise StaleError(f"{self._root} was opened by another coordinator since") from None
        discarded.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Remove a bin (a folder of deleted files), unless its owner puts a file into it meanwhile."""
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _identity(descriptor: int) -> _Identity:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


# ---- Claims ----
#
# A claim protects a blob that a process has written, or is to keep, and that no event has named
# yet.
#
# The writer of a blob reports the event that names it right after that, and others may write the
# same bytes meanwhile. So each writing is a claim, and each event that names the blob settles the
# oldest one. A claim whose event never comes lapses after a grace period. Claims are not
# thread-safe.


class Claims:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since_s: dict[Digest, tuple[float, ...]] = {}
        """The times of each blob's claims, oldest first, keyed by digest."""

    def add(self, digest: Digest) -> None:
        """Claim a blob that was written or must be kept, for an event that will name it."""
        self._since_s[digest] = (*self._since_s.get(digest, ()), self._monotonic())

    def settle(self, digest: Digest) -> None:
        """Remove the blob's oldest claim, because one event that names the blob is durable."""
        if digest in self._since_s:
            self._since_s[digest] = self._since_s[digest][1:]

    def hold(self, digest: Digest, grace_s: float) -> bool:
        """Return True if the blob is claimed: an event that names it may still come."""
        newest_s = self._since_s.get(digest, ())[-1:]
        return any(self._monotonic() - since_s < grace_s for since_s in newest_s)

    def forget(self, digest: Digest) -> None:
        """Remove all claims of a blob that was deleted."""
        self._since_s.pop(digest, None)

    def forget_old(self, grace_s: float) -> None:
        """Remove the records of blobs whose claims are all settled or older than grace_s."""
        for digest in [
            candidate for candidate in self._since_s if not self.hold(candidate, grace_s)
        ]:
            del self._since_s[digest]
