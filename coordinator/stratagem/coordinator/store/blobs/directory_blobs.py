"""Blobs as files under one folder: root/aa/<digest>.safetensors.

Collecting moves a blob into a bin, root/bins/<token>, of which each opening has its own and removes
all others: a coordinator that was frozen and replaced, wherever it stopped, finds that it cannot
collect any more, for its successor may have stored the same bytes again. See blob_store.py for the
rules. Knows nothing of runs.
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
from typing import Final

from stratagem.common.base.errors import InvalidInputError, StaleError
from stratagem.common.base.ids import Digest
from stratagem.common.process.failpoints import failpoint
from stratagem.coordinator.store.blobs.blob_store import (
    Adopt,
    BlobWriter,
    DamagedBlobError,
    MissingBlobError,
)
from stratagem.coordinator.store.blobs.durable_file import (
    DurableFile,
    MakeRoom,
    make_folder,
    no_room,
    open_regular,
    pieces,
    sync_folder,
)
from stratagem.coordinator.store.blobs.temporary_files import Scratch, remove_if_abandoned
from stratagem.coordinator.store.blobs.unsettled_blobs import Claims
from stratagem.coordinator.store.blobs.verified_file import BlobFile, FileContent, Sums

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
SUFFIX: Final = ".safetensors"
_Identity = tuple[int, int, int]  # inode, size, time of change


@dataclass(frozen=True, slots=True)
class Stored:
    """The file of a blob: its size, and when it was last used."""

    digest: Digest
    num_bytes: int
    used_ns: int


class DirectoryBlobs:
    """The blobs under one folder, which is made if absent. See blob_store.py for the rules."""

    def __init__(
        self,
        root: Path,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        is_durable: bool = True,
        make_room: MakeRoom = no_room,
        suffix: str = SUFFIX,
    ) -> None:
        """is_durable: what was written survives a power cut; needless for mere copies. make_room:
        asked while a blob meets a full disk. suffix: of the names of its files."""
        self._root = root
        self._suffix = suffix
        self._is_durable = is_durable
        self.make_room = make_room
        self._temporary = root / "tmp"
        self._verified: dict[Digest, tuple[_Identity, Sums]] = {}
        self._claims = Claims(monotonic)
        self._present: set[Digest] | None = None
        """What there is to collect: to look into all folders takes some milliseconds, which is as
        long as it takes to write a small state."""
        self._lock = threading.Lock()  # a blob is not collected while it is being named
        root.parent.mkdir(parents=True, exist_ok=True)
        make_folder(root)
        make_folder(self._temporary)
        for path in self._temporary.iterdir():
            remove_if_abandoned(path)
        self._bin = new_bin(root / "bins")

    def writer(self, total_bytes: int, adopt: Adopt | None = None) -> BlobWriter:
        """Return a writer for a blob of exactly total_bytes; `adopt` may do more than this store's
        own."""
        return BlobWriter(self._temporary, total_bytes, adopt or self.adopt, self.make_room)

    def scratch(self) -> Scratch:
        """Return a file for bytes that will become part of a blob."""
        return Scratch(self._temporary, self.make_room)

    def keep_room(self) -> None:
        """Do nothing: every blob here is needed."""

    def open(self, digest: Digest) -> BlobFile:
        """Open the blob as a file to read; see BlobStore."""
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
        """Return the blob of a file that is open and verified; takes the descriptor over."""
        return BlobFile(FileContent(descriptor, digest, sums, lambda: self._distrust(digest)))

    def _distrust(self, digest: Digest) -> None:
        """Have the next `open` verify the whole blob: a read did not give the bytes that were
        stored."""
        with self._lock:
            self._verified.pop(digest, None)

    def path(self, digest: Digest) -> Path:
        """Return the path of the blob's file, which is not verified. Raises NotFoundError."""
        if not self.exists(digest):
            raise MissingBlobError(digest)
        return self._path(digest)

    def exists(self, digest: Digest) -> bool:
        """Return True when the blob is in the store, whole or damaged."""
        path = self._path(digest)
        return path.is_file() and not path.is_symlink() and not path.parent.is_symlink()

    def keep(self, digest: Digest) -> bool:
        """Return True when the blob is in the store; it then counts as just written."""
        with self._lock:
            if not self.exists(digest):
                return False
            self._claims.add(digest)
            return True

    def settle(self, digest: Digest) -> None:
        """Note that the event that names the blob is durable; see BlobStore."""
        with self._lock:
            self._claims.settle(digest)

    def location(self, digest: Digest) -> str:
        """Return the path of the blob's file; "" when it is not in the store."""
        return str(self._path(digest).resolve()) if self.exists(digest) else ""

    def collect(self, live: Container[Digest], grace_s: float) -> list[Digest]:
        """Delete the blobs that are not in `live`, and return them; see BlobStore.

        Raises StaleError when another coordinator has opened the folder since.
        """
        with self._lock:
            if self._present is None:
                self._present = set(self.digests())
            present = self._present.copy()
        garbage = sorted(digest for digest in present if digest not in live)
        return [digest for digest in garbage if self._delete(digest, grace_s)]

    def adopt(self, digest: Digest, file: DurableFile, temporary: Path, sums: Sums) -> None:
        """Give a complete file its name. One of the same name is replaced by its equal."""
        if self._is_durable:
            file.sync()
        path = self._path(digest)
        with self._lock:
            make_folder(path.parent)
            # What is there after an error here, the next collection finds by looking.
            known, self._present = self._present, None
            failpoint("coordinator.blobs.before_rename")
            temporary.rename(path)
            if self._is_durable:
                sync_folder(path.parent)
            failpoint("coordinator.blobs.after_rename")
            self._claims.add(digest)
            self._verified[digest] = _identity(file.descriptor), sums
            self._present = known
            if known is not None:
                known.add(digest)

    def drop(self, digest: Digest) -> None:
        """Delete a blob, if it is there; readers that have it open can continue."""
        with self._lock:
            self._path(digest).unlink(missing_ok=True)
            self._forget(digest)

    def touch(self, digest: Digest) -> None:
        """Note that the blob is used now, for `stored` after a restart."""
        with suppress(FileNotFoundError):
            modified_ns = self._path(digest).stat().st_mtime_ns
            os.utime(self._path(digest), ns=(time.time_ns(), modified_ns))

    def stored(self) -> list[Stored]:
        """Return all blobs, not verified."""
        blobs = []
        for digest in self.digests():
            with suppress(FileNotFoundError):
                status = self._path(digest).stat()
                blobs.append(Stored(digest, status.st_size, status.st_atime_ns))
        return blobs

    def digests(self) -> Iterator[Digest]:
        """Yield the digests of all blobs that are in the store."""
        for folder in sorted(self._root.glob("[0-9a-f][0-9a-f]")):
            for path in sorted(folder.glob(f"*{self._suffix}")):
                if _DIGEST.fullmatch(path.stem):
                    yield Digest(path.stem)

    def _delete(self, digest: Digest, grace_s: float) -> bool:
        with self._lock:
            if self._claims.hold(digest, grace_s):
                return False
            self._discard(digest)
            self._forget(digest)
            return True

    def _discard(self, digest: Digest) -> None:
        """Move the blob into the bin in one step, which fails once the bin is gone; a prior check
        could be outdated, and what has the name after that is a successor's."""
        discarded = self._bin / digest
        try:
            self._path(digest).rename(discarded)
        except FileNotFoundError:
            if not self._bin.is_dir():
                raise StaleError(f"{self._root} was opened by another coordinator since") from None
        discarded.unlink(missing_ok=True)

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
        """The checksums of a blob that has its digest, or had it and has not been replaced."""
        identity = _identity(descriptor)
        known = self._verified.get(digest)
        if known is not None and known[0] == identity:
            return known[1]
        num_bytes = os.fstat(descriptor).st_size
        hasher, sums = hashlib.sha256(), Sums(num_bytes)
        for piece in pieces(descriptor, num_bytes):
            hasher.update(piece)
            sums.add(piece)
        if hasher.hexdigest() != digest:
            raise DamagedBlobError(digest)
        self._verified[digest] = identity, sums
        return sums


def new_bin(bins: Path) -> Path:
    """A bin of our own, made after all others are gone."""
    make_folder(bins)
    for other in bins.iterdir():
        while other.is_dir():
            with suppress(FileNotFoundError):  # another process opens the folder, too
                _remove(other)
    own = bins / secrets.token_hex(8)
    make_folder(own)
    return own


def _remove(folder: Path) -> None:
    """Remove a bin, unless its owner throws something in meanwhile."""
    for left in folder.iterdir():
        left.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise


def _identity(descriptor: int) -> _Identity:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns
