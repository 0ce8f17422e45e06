"""SharedBlobs stores blobs in an object store that several coordinators share, as
blobs/<digest>/<term>-<token>...

A blob is first written into a local file, since its digest is known only at the end. It counts as
written when the object store has all of it. Blobs that were written or read stay in a local cache.
Each write makes an object of its own (bucket.py gives the reason), so a blob can exist more than
once for a while; any copy will do.
"""

import os
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Final

import structlog

from stratagem.common.base.errors import IntegrityError, InvalidInputError, NotFoundError
from stratagem.common.base.ids import Digest
from stratagem.coordinator.store.blobs import (
    SUFFIX,
    Adopt,
    BlobWriter,
    Claims,
    DamagedBlobError,
    DirectoryBlobs,
    MissingBlobError,
)
from stratagem.coordinator.store.bucket import (
    Objects,
    StoredObject,
    deletable,
    mark,
    term_of,
    unique_name,
)
from stratagem.coordinator.store.files import (
    PIECE_BYTES,
    BlobFile,
    DurableFile,
    NoSpaceError,
    Scratch,
    Sums,
    space_needed,
)

# ---- Local cache ----
#
# The cache holds copies of remote blobs, up to a number of bytes, and while the disk has room.
#
# A copy is verified once, like any blob in a folder; a damaged one is forgotten, and the blob is
# fetched again. The copy that was used least recently goes first. Its file stays readable for
# those who have it open, and a crash leaves whole copies or none. Open copies may exceed the
# limit, and so may the newest copy, which is removed only when the disk is full: no copy is worth
# a commit.

MAX_BYTES: Final = 32 * 2**30
MAX_RESERVE_BYTES: Final = 2**30


class BlobCache:
    """A cache of blobs in one folder, which is made if absent. Thread-safe."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._root = root
        self._copies = DirectoryBlobs(root, is_durable=False, make_room=self.make_room)
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        by_use = sorted(self._copies.stored(), key=lambda copy: copy.used_ns)
        self._sizes = OrderedDict((copy.digest, copy.num_bytes) for copy in by_use)
        self._evict()

    def writer(self, total_bytes: int, adopt: Adopt) -> BlobWriter:
        """Return a writer whose file can become a cached copy by a rename."""
        return self._copies.writer(total_bytes, adopt)

    def scratch(self) -> Scratch:
        return self._copies.scratch()

    def open(self, digest: Digest) -> BlobFile | None:
        """Open the verified cached copy of a blob; None if there is none."""
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
        """Return an open file as the verified copy of a blob, and take over the descriptor."""
        return self._copies.opened(digest, descriptor, sums)

    def adopt(self, digest: Digest, file: DurableFile, temporary: Path, sums: Sums) -> None:
        """Cache a complete file that `writer` wrote, whose digest is right; skip this if the disk
        has no room for its name."""
        try:
            with space_needed():
                self._copies.adopt(digest, file, temporary, sums)
        except NoSpaceError as error:
            _log.warning("no local copy of a blob is kept", digest=digest, reason=str(error))
            temporary.unlink(missing_ok=True)
            return
        self._copies.touch(digest)  # by the clock of its later uses, as the disk may have its own
        with self._lock:
            self._sizes[digest] = file.num_bytes
            self._sizes.move_to_end(digest)
        self._evict()

    def drop(self, digest: Digest) -> None:
        """Remove a blob from the cache, if present."""
        with self._lock:
            self._sizes.pop(digest, None)
        self._copies.drop(digest)

    def make_room(self) -> bool:
        """Remove the least recently used copy; return False if there is none."""
        with self._lock:
            if not self._sizes:
                return False
            oldest, _ = self._sizes.popitem(last=False)
        _log.info("a local copy makes room on the disk", digest=oldest)
        self._copies.drop(oldest)
        return True

    def keep_room(self) -> None:
        """Remove copies, except the newest, until the disk has some free space again."""
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
    """Return the default size of the cache: 32 GiB, or half of a smaller file system."""
    disk = os.statvfs(folder)
    return min(MAX_BYTES, disk.f_blocks * disk.f_frsize // 2)


def reserve_bytes(folder: Path) -> int:
    """Return the space that the cache leaves free: 1 GiB, or a twentieth of a small file system."""
    disk = os.statvfs(folder)
    return min(MAX_RESERVE_BYTES, disk.f_blocks * disk.f_frsize // 20)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the file system, as available to this process."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


# ---- Store ----

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
FOLDER: Final = "blobs"

_log = structlog.get_logger(__name__)


class SharedBlobs:
    """The blobs below one prefix, for one leadership term of a coordinator. See blobs.py."""

    def __init__(
        self,
        objects: Objects,
        cache: BlobCache,
        term: int,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        folder: str = FOLDER,
        suffix: str = SUFFIX,
    ) -> None:
        """Begin without claims. folder, suffix: the folder and the suffix of the object names."""
        self._objects, self._cache, self._term = objects, cache, term
        self._folder, self._suffix = folder, suffix
        self._claims = Claims(monotonic)
        self._writing: Counter[Digest] = Counter()
        self._lock = threading.Lock()  # a blob is not collected while it is being named
        self._collecting = threading.Lock()  # a slow store must not have them wait in a row
        self._fetches: dict[Digest, threading.Lock] = {}

    def writer(self, total_bytes: int) -> BlobWriter:
        """Return a writer for a blob of exactly total_bytes, which is uploaded on commit."""
        return self._cache.writer(total_bytes, self._adopt)

    def scratch(self) -> Scratch:
        return self._cache.scratch()

    def open(self, digest: Digest) -> BlobFile:
        """Open a local copy of the blob, downloading it if need be; see BlobStore."""
        _check(digest)
        file = self._cache.open(digest)
        if file is not None:
            return file
        with self._lock:
            fetch = self._fetches.setdefault(digest, threading.Lock())
        try:
            with fetch:  # those who want the same blob share one transfer
                file = self._cache.open(digest)
                return file if file is not None else self._fetch(digest)
        finally:
            self._fetches.pop(digest, None)

    def exists(self, digest: Digest) -> bool:
        return bool(self._copies_of(digest))

    def keep(self, digest: Digest) -> bool:
        """Protect a blob from collection until a fact names it, by making sure that an object of
        this leadership term holds it; return False if the blob is missing."""
        _check(digest)
        with self._lock:
            self._claims.add(digest)
        copies = self._copies_of(digest)
        if any(term_of(stored.name) == self._term for stored in copies):
            return True
        # What an earlier leader wrote, it may still delete, not knowing that it leads no more.
        return bool(copies) and self._rewrite(digest)

    def location(self, digest: Digest) -> str:
        """Return "": the blob has no path on this machine."""
        _check(digest)
        return ""

    def settle(self, digest: Digest) -> None:
        with self._lock:
            self._claims.settle(digest)

    def make_room(self) -> bool:
        return self._cache.make_room()

    def keep_room(self) -> None:
        self._cache.keep_room()

    def collect(self, live: Container[Digest], grace_s: float) -> list[Digest]:
        if not self._collecting.acquire(blocking=False):  # the next one will do
            return []
        try:
            collected = []
            for digest, copies in self._all():
                if digest in live:
                    self._objects.delete(stored.name for stored in copies[:-1])
                elif self._delete(digest, copies, grace_s):
                    collected.append(digest)
            with self._lock:
                self._claims.forget_old(grace_s)
            return collected
        finally:
            self._collecting.release()

    def digests(self) -> list[Digest]:
        """Return the digests of all blobs that are in the object store."""
        listed = self._objects.list(self._folder)
        named = {stored.name.split("/")[1] for stored in listed if term_of(stored.name) is not None}
        return [Digest(digest) for digest in sorted(named) if _DIGEST.fullmatch(digest)]

    def _all(self) -> list[tuple[Digest, list[StoredObject]]]:
        """Return the objects that this coordinator may delete, grouped by blob, newest last."""
        listed = deletable(self._objects.list(self._folder), mark(self._term))
        groups = groupby(listed, key=lambda stored: stored.name.split("/")[1])
        return [(Digest(digest), list(group)) for digest, group in groups]

    def _delete(self, digest: Digest, copies: list[StoredObject], grace_s: float) -> bool:
        with self._lock:
            if digest in self._writing or self._claims.hold(digest, grace_s):
                return False
            self._objects.delete(stored.name for stored in copies)
        self._cache.drop(digest)
        return True

    def _copies_of(self, digest: Digest) -> list[StoredObject]:
        """Return the objects in the bucket that hold a blob, newest last."""
        folder = f"{self._folder}/{_check(digest)}"
        return [stored for stored in self._objects.list(folder) if term_of(stored.name) is not None]

    def _fetch(self, digest: Digest) -> BlobFile:
        """Download the blob into the cache, verifying it on the way."""
        is_damaged = False
        for _ in range(2):  # of what was listed, all may have been replaced by a new object
            for stored in reversed(self._copies_of(digest)):
                try:
                    return self._copy(digest, stored)
                except IntegrityError as error:  # there may be another one
                    is_damaged = True
                    _log.warning("an object is damaged", name=stored.name, reason=str(error))
                except NotFoundError:
                    continue
            if is_damaged:
                raise DamagedBlobError(digest)
        raise MissingBlobError(digest)

    def _copy(self, digest: Digest, source: StoredObject) -> BlobFile:
        opened: list[BlobFile] = []

        def adopt(digest: Digest, file: DurableFile, temporary: Path, sums: Sums) -> None:
            # Open before it is a copy that may be evicted.
            opened.append(self._cache.opened(digest, os.dup(file.descriptor), sums))
            self._cache.adopt(digest, file, temporary, sums)

        writer = self._cache.writer(source.num_bytes, adopt)
        try:
            for piece in self._objects.read(source):
                writer.write(piece)
            if writer.digest != digest:
                raise IntegrityError("its bytes have another digest")
            writer.commit()
        except BaseException:
            writer.abort()
            for file in opened:
                file.close()
            raise
        opened[0].seek(0)
        return opened[0]

    def _rewrite(self, digest: Digest) -> bool:
        try:
            with self.open(digest) as file:
                self._put(digest, read_pieces(file, file.num_bytes), file.num_bytes)
        except (IntegrityError, NotFoundError):
            return False
        return True

    def _adopt(self, digest: Digest, file: DurableFile, temporary: Path, sums: Sums) -> None:
        self._put(digest, own_pieces(file.descriptor, file.num_bytes), file.num_bytes)
        self._cache.adopt(digest, file, temporary, sums)

    def _put(self, digest: Digest, pieces: Iterator[bytes], num_bytes: int) -> None:
        name = f"{self._folder}/{digest}/{unique_name(self._term)}{self._suffix}"
        with self._naming(digest):
            self._objects.put(name, pieces, num_bytes)

    @contextmanager
    def _naming(self, digest: Digest) -> Iterator[None]:
        """Context manager that keeps a blob from being collected while it is written, and for the
        grace period after that."""
        with self._lock:
            self._writing[digest] += 1
        try:
            yield
        finally:
            with self._lock:
                self._claims.add(digest)
                self._writing[digest] -= 1
                if not self._writing[digest]:
                    del self._writing[digest]


def own_pieces(descriptor: int, num_bytes: int) -> Iterator[bytes]:
    """Yield a file from its start, in pieces that share no buffer with each other."""
    offset = 0
    while offset < num_bytes:
        piece = os.pread(descriptor, min(PIECE_BYTES, num_bytes - offset), offset)
        if not piece:
            raise IntegrityError(f"a file ends after {offset} of {num_bytes} bytes")
        yield piece
        offset += len(piece)


def read_pieces(file: BlobFile, num_bytes: int) -> Iterator[bytes]:
    """Yield num_bytes of a blob from its current position on, checked, in pieces that each own
    their memory; fewer at the end of the blob."""
    while piece := file.read(min(PIECE_BYTES, num_bytes)):
        yield piece
        num_bytes -= len(piece)


def _check(digest: Digest) -> Digest:
    if not _DIGEST.fullmatch(digest):
        raise InvalidInputError.at("digest", f"{digest!r} is not 64 of 0-9, a-f")
    return digest
