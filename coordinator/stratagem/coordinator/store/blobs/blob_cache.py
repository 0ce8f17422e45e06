"""A local cache of remote blobs, up to a number of bytes, and while the disk has room.

A copy is verified once, like any blob in a folder; one that is damaged is forgotten, and the blob
is fetched again. The copy that was used least recently goes first. Its file stays readable for
those who have it open, and a crash leaves whole copies or none. So the limit may be passed by what
is open, and by the newest copy, which goes only where the disk is full: no copy is worth a commit.
"""

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final

import structlog

from stratagem.common.base.errors import IntegrityError, NotFoundError
from stratagem.common.base.ids import Digest
from stratagem.coordinator.store.blobs.blob_store import Adopt, BlobWriter
from stratagem.coordinator.store.blobs.directory_blobs import DirectoryBlobs
from stratagem.coordinator.store.blobs.durable_file import DurableFile, NoSpaceError, space_needed
from stratagem.coordinator.store.blobs.temporary_files import Scratch
from stratagem.coordinator.store.blobs.verified_file import BlobFile, Sums

MAX_BYTES: Final = 32 * 2**30
MAX_RESERVE_BYTES: Final = 2**30

_log = structlog.get_logger(__name__)


class BlobCache:
    """The copies under one folder, which is made if absent; for any thread."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._copies = DirectoryBlobs(root, is_durable=False, make_room=self.make_room)
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        by_use = sorted(self._copies.stored(), key=lambda copy: copy.used_ns)
        self._sizes = OrderedDict((copy.digest, copy.num_bytes) for copy in by_use)
        self._evict()

    def writer(self, total_bytes: int, adopt: Adopt) -> BlobWriter:
        """Return a writer whose file is stored where it can become a copy without copying."""
        return self._copies.writer(total_bytes, adopt)

    def scratch(self) -> Scratch:
        """Return a file for bytes that will become part of a blob."""
        return self._copies.scratch()

    def open(self, digest: Digest) -> BlobFile | None:
        """Return the verified copy; None when there is none."""
        try:
            file = self._copies.open(digest)
        except NotFoundError:
            return None
        except IntegrityError as error:
            _log.warning("the local copy of a blob is forgotten", reason=str(error))
            self.drop(digest)
            return None
        with self._lock:
            if digest in self._sizes:
                self._sizes.move_to_end(digest)
        self._copies.touch(digest)
        return file

    def opened(self, digest: Digest, descriptor: int, sums: Sums) -> BlobFile:
        """Return the verified copy of an open file that may soon be evicted; takes the descriptor
        over."""
        return self._copies.opened(digest, descriptor, sums)

    def adopt(self, digest: Digest, file: DurableFile, temporary: Path, sums: Sums) -> None:
        """Make a copy of a complete file that `writer` has written, whose digest is right; no copy
        is made where the disk has no room for its name."""
        try:
            with space_needed():
                self._copies.adopt(digest, file, temporary, sums)
        except NoSpaceError as error:
            _log.warning("no local copy of a blob is kept", digest=digest, reason=str(error))
            temporary.unlink(missing_ok=True)
            return
        with self._lock:
            self._sizes[digest] = file.num_bytes
            self._sizes.move_to_end(digest)
        self._evict()

    def drop(self, digest: Digest) -> None:
        """Forget the copy, if there is one."""
        with self._lock:
            self._sizes.pop(digest, None)
        self._copies.drop(digest)

    def make_room(self) -> bool:
        """Drop the copy that was used least recently; False when there is none."""
        with self._lock:
            if not self._sizes:
                return False
            oldest, _ = self._sizes.popitem(last=False)
        _log.info("a local copy makes room on the disk", digest=oldest)
        self._copies.drop(oldest)
        return True

    def keep_room(self) -> None:
        """Drop copies, but for the newest one, until the disk has some room for others."""
        while len(self._sizes) > 1 and free_bytes(self._root) < reserve_bytes(self._root):
            self.make_room()

    def _evict(self) -> None:
        while True:
            with self._lock:
                if len(self._sizes) < 2 or sum(self._sizes.values()) <= self._limit_bytes:
                    break
                oldest, _ = self._sizes.popitem(last=False)
            self._copies.drop(oldest)
        self.keep_room()


def default_limit_bytes(folder: Path) -> int:
    """Return the default size of the cache: 32 GiB, or half of the file system where that is
    less."""
    disk = os.statvfs(folder)
    return min(MAX_BYTES, disk.f_blocks * disk.f_frsize // 2)


def reserve_bytes(folder: Path) -> int:
    """Return the bytes that copies leave free: 1 GiB, or a twentieth of the file system where that
    is less."""
    disk = os.statvfs(folder)
    return min(MAX_RESERVE_BYTES, disk.f_blocks * disk.f_frsize // 20)


def free_bytes(folder: Path) -> int:
    """Return the bytes of the file system that are free for this process."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
