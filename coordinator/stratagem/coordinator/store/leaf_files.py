"""LeafFiles stores leaves (content-addressed pieces of states) as files: opens them with every byte
checked, and collects unneeded ones.

Workers write the files, so a leaf counts only when its digest has been verified here. Collecting
moves a file into a bin of this opening of the folder, of which the next opening removes all others:
a coordinator that was frozen and replaced cannot delete what its successor relies on.
"""

import hashlib
import os
import secrets
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, Self

from stratagem.common.base.errors import IntegrityError, UnavailableError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import StateFolder, digest_and_upload
from stratagem.common.tensors.stream import CHUNK_BYTES, crc32c
from stratagem.coordinator.store.blobs import Bin, MissingBlobError
from stratagem.coordinator.store.files import (
    DurableFile,
    make_folder,
    open_regular,
    space_needed,
    sync_folder,
)

# ---- Interface ----
#
# LeafStore states what any place for the leaves of states guarantees.
#
# Each upload writes a leaf under a name of its own, so nothing is overwritten, and there may be
# equal copies. All methods may be called from any thread, and may block on a disk or a network.


class NewLeaf(Protocol):
    """Receives the bytes of a leaf that the coordinator stores: write them, then keep or drop."""

    def write(self, data: memoryview) -> None: ...
    def keep(self, digest: Digest) -> None: ...
    def drop(self) -> None: ...


class LeafStore(Protocol):
    """A store of leaves (content-addressed pieces of states), which all runs' states share."""

    def new(self, upload: str) -> NewLeaf:
        """Return a receiver for the bytes of a new leaf of this upload."""

    def open(self, digest: Digest) -> "OpenLeaf":
        """Open an undamaged copy of a leaf. Raises MissingBlobError if there is no copy,
        IntegrityError if all are damaged."""

    def reliable(self, leaves: Collection[Digest]) -> Collection[Digest]:
        """Return those leaves that a state may reuse, as only this coordinator may delete them."""

    def keep(self, leaves: Sequence[Digest]) -> bool:
        """Ensure that no other coordinator deletes a state's leaves; False if one is missing."""

    def lacking(self, upload: str, sizes: Mapping[Digest, int]) -> set[Digest]:
        """Return the leaves that the upload has not written with their expected size; the others
        may be committed. sizes: the expected size of each leaf."""

    def missing(self, leaves: Sequence[Digest]) -> list[Digest]:
        """Return the leaves of a state that are not in the store."""

    def check(self, digest: Digest, upload: str) -> bool:
        """Read a leaf that an upload wrote; return True if its bytes match its digest."""

    def all_copies(self) -> Collection[Any]:
        """Return all stored copies of leaves, as `collect` needs them."""

    def collect(
        self, copies: Collection[Any], named: Collection[Digest], under_way: Collection[str]
    ) -> None:
        """Delete copies that neither a list of leaves nor a claim needs; of equal copies keep the
        newest sound one.

        copies: the copies of all leaves, listed before `named` and `under_way` were determined;
        later claims are respected, too.
        """


# ---- Claims ----
#
# A claim protects leaves that no list of a kept state may name: those that an upload relies on or
# writes, and those that a reader may still open. Claims are thread-safe.


class LeafClaims:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        """A lock that is held while existing leaves are claimed, and while leaves are deleted."""
        self._uploads: set[str] = set()
        self._used: Counter[Digest] = Counter()

    def begin(self, upload: str, leaves: Collection[Digest]) -> None:
        """Register an upload in progress, and claim the leaves that it relies on."""
        with self.lock:
            self._uploads.add(upload)
            self._used.update(leaves)

    def end(self, upload: str, leaves: Collection[Digest]) -> None:
        with self.lock:
            self._uploads.discard(upload)
            self.release(leaves)

    def use(self, leaves: Collection[Digest]) -> None:
        """Claim these leaves for a reader, so that they are not collected."""
        with self.lock:
            self._used.update(leaves)

    def release(self, leaves: Collection[Digest]) -> None:
        with self.lock:
            self._used -= Counter(leaves)  # and none is left of those that are 0

    def present(self) -> tuple[frozenset[str], frozenset[Digest]]:
        """Return the uploads in progress, and the leaves in use."""
        with self.lock:
            return frozenset(self._uploads), frozenset(self._used)

    def is_under_way(self, upload: str) -> bool:
        with self.lock:
            return upload in self._uploads

    def is_used(self, leaf: Digest) -> bool:
        with self.lock:
            return leaf in self._used


# ---- Files ----

_NUM_FOLDERS: Final = 256
_Identity = tuple[int, int, int]  # inode, size, time of change


class OpenLeaf:
    """An open leaf with a checksum per chunk, so that every read is checked; the file is closed
    with its last reader."""

    def __init__(self, digest: Digest, descriptor: int, sums: Sequence[int]) -> None:
        weakref.finalize(self, os.close, descriptor)
        self._digest, self._descriptor, self._sums = digest, descriptor, sums
        self._newest: tuple[int, memoryview] = (-1, memoryview(b""))

    @classmethod
    def of(cls, digest: Digest, descriptor: int, size: int) -> Self | None:
        """Open a file of `size` bytes, taking over the descriptor; None if the digest differs."""
        sums = sums_of(digest, descriptor, size)
        if sums is None:
            os.close(descriptor)
            return None
        return cls(digest, descriptor, sums)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` with the leaf's bytes from an offset on. Raises UnavailableError if they
        changed since the leaf was opened."""
        done = 0
        while done < len(view):
            number, skipped = divmod(offset + done, CHUNK_BYTES)
            piece = self._chunk(number)[skipped : skipped + len(view) - done]
            if not piece:
                self._fail()
            view[done : done + len(piece)] = piece
            done += len(piece)

    def _chunk(self, number: int) -> memoryview:
        newest = self._newest  # several threads may read
        if newest[0] != number:
            data = os.pread(self._descriptor, CHUNK_BYTES, number * CHUNK_BYTES)
            if number >= len(self._sums) or crc32c(data) != self._sums[number]:
                self._fail()
            newest = self._newest = number, memoryview(data)
        return newest[1]

    def _fail(self) -> None:
        raise UnavailableError(f"leaf {self._digest} has changed where it is stored")


class _NewFile:
    """A leaf that the coordinator is receiving, in an unfinished file."""

    def __init__(self, folder: StateFolder, upload: str) -> None:
        self._folder, self._upload = folder, upload
        self._path = folder.temporary / f"{upload}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with space_needed():
            self._file = DurableFile(os.open(self._path, flags, 0o600))
        self.write = self._file.write

    def keep(self, digest: Digest) -> None:
        self._file.sync()
        self._file.close()
        path = self._folder.leaf_path(digest, self._upload)
        with space_needed():
            self._path.rename(path)
            sync_folder(path.parent)

    def drop(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class LeafFiles:
    """The leaves in one folder, which is made if absent; see LeafStore."""

    def __init__(self, folder: StateFolder, claims: LeafClaims) -> None:
        self._folder, self._claims = folder, claims
        self._verified: dict[Digest, tuple[_Identity, Sequence[int]]] = {}
        make_folder(folder.leaves)
        make_folder(folder.temporary)
        for number in range(_NUM_FOLDERS):  # workers need not make them durable
            (folder.leaves / f"{number:02x}").mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.leaves)
        self._bin = Bin(folder.leaves / "bins", folder.root)

    def new(self, upload: str) -> _NewFile:
        return _NewFile(self._folder, upload)

    def reliable(self, leaves: Collection[Digest]) -> Collection[Digest]:
        """Return all of these leaves: a replaced coordinator cannot delete any."""
        return leaves

    def keep(self, leaves: Sequence[Digest]) -> bool:
        """Return True: leaves that a list names stay; see LeafStore."""
        return True

    def lacking(self, upload: str, sizes: Mapping[Digest, int]) -> set[Digest]:
        return {digest for digest, size in sizes.items() if self._size(digest, upload) != size}

    def missing(self, leaves: Sequence[Digest]) -> list[Digest]:
        """Return the leaves among these that have no file, whole or damaged."""
        return [leaf for leaf in leaves if not self._folder.copies(leaf)]

    def open(self, digest: Digest) -> OpenLeaf:
        is_there = False
        for path in self._folder.copies(digest):
            try:
                descriptor = open_regular(path)
            except FileNotFoundError:  # an equal copy has stayed, or another one will be found
                continue
            is_there = True
            sums = self._verify(digest, descriptor)
            if sums is not None:
                return OpenLeaf(digest, descriptor, sums)
            os.close(descriptor)
        if is_there:
            name = f"leaves/{digest[:2]}/{digest}-*"
            raise IntegrityError(f"its leaf {name} has other bytes than were written")
        raise MissingBlobError(digest)

    def check(self, digest: Digest, upload: str) -> bool:
        return self._is_sound(self._folder.leaf_path(digest, upload), digest)

    def all_copies(self) -> list[Path]:
        """Return the files of all leaves, including unfinished ones."""
        return [
            path
            for folder in sorted(self._folder.leaves.iterdir())
            if folder.name != "bins"
            for path in sorted(folder.iterdir())
        ]

    def collect(
        self, copies: Collection[Path], named: Collection[Digest], under_way: Collection[str]
    ) -> None:
        by_digest: dict[Digest, list[Path]] = {}
        for path in sorted(copies, reverse=True):  # of a leaf, the newest first
            if path.parent == self._folder.temporary:
                if path.name.rpartition("-")[0] not in under_way:
                    path.unlink(missing_ok=True)
                continue
            digest, upload = digest_and_upload(path.name)
            if upload not in under_way:
                by_digest.setdefault(digest, []).append(path)
        for digest, paths in by_digest.items():
            spared = paths[0]
            if len(paths) > 1 and digest in named:
                spared = next((copy for copy in paths if self._is_sound(copy, digest)), spared)
            for path in paths:
                with self._claims.lock:
                    is_needed = digest in named or self._claims.is_used(digest)
                    if not is_needed or path != spared:
                        self._discard(path)

    def _size(self, digest: Digest, upload: str) -> int:
        try:
            return self._folder.leaf_path(digest, upload).stat().st_size
        except OSError:
            return -1

    def _is_sound(self, path: Path, digest: Digest) -> bool:
        try:
            descriptor = open_regular(path)
        except OSError:
            return False
        try:
            return self._verify(digest, descriptor) is not None
        finally:
            os.close(descriptor)

    def _discard(self, path: Path) -> None:
        self._bin.discard(path)
        self._verified.pop(digest_and_upload(path.name)[0], None)

    def _verify(self, digest: Digest, descriptor: int) -> Sequence[int] | None:
        """Return the checksums of a file whose bytes match the digest; None if they do not."""
        status = os.fstat(descriptor)
        identity = status.st_ino, status.st_size, status.st_mtime_ns
        verified = self._verified.get(digest)
        if verified is not None and verified[0] == identity:
            return verified[1]
        sums = sums_of(digest, descriptor, status.st_size)
        if sums is None:
            return None
        self._verified[digest] = identity, sums
        return sums


def sums_of(digest: Digest, descriptor: int, size: int) -> Sequence[int] | None:
    """Return the checksum of each chunk of a file; None if its digest is another one."""
    hasher, sums = hashlib.sha256(), array("I")
    for offset in range(0, size, CHUNK_BYTES):
        data = os.pread(descriptor, CHUNK_BYTES, offset)
        hasher.update(data)
        sums.append(crc32c(data))
    return sums if hasher.hexdigest() == digest else None
