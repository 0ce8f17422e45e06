"""The leaves of states as objects that workers write by signed requests: leaves/<sha256>/<upload>.

As everywhere in a bucket (decision 11) a coordinator deletes only objects of its own and of earlier
terms, and relies only on objects of its own term: workers write other leaves of an upload again,
and a state that a fact will name is copied inside the store. Workers write the objects, so a leaf
counts only when its digest has been verified here.
"""

import hashlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from typing import Final, TypeVar
from weakref import WeakValueDictionary

import structlog

from stratagem.common.base.errors import IntegrityError, NotFoundError, WrongStateError
from stratagem.common.base.ids import Digest
from stratagem.coordinator.store.blobs import MissingBlobError
from stratagem.coordinator.store.bucket import (
    Objects,
    StoredObject,
    deletable,
    mark,
    term_of,
    unique_name,
)
from stratagem.coordinator.store.files import Scratch
from stratagem.coordinator.store.leaf_files import LeafClaims, OpenLeaf

VALID_FOR: Final = timedelta(minutes=15)
"""The time for which a signed URL is valid; later callers ask for a new one."""
_FOLDER: Final = "leaves"
_SUFFIX: Final = ".leaf"
_NUM_AT_ONCE: Final = 16
"""The number of concurrent requests that have small answers."""
_NUM_DELETED: Final = 1000

T = TypeVar("T")
R = TypeVar("R")

_log = structlog.get_logger(__name__)


class _NewObject:
    """A leaf that the coordinator is receiving, in a scratch file until it is complete."""

    def __init__(self, objects: Objects, scratch: Scratch, upload: str) -> None:
        self._objects, self._scratch, self._upload, self._size = objects, scratch, upload, 0

    def write(self, data: memoryview) -> None:
        self._scratch.write(data)
        self._size += len(data)

    def keep(self, digest: Digest) -> None:
        pieces = (bytes(piece) for piece in self._scratch.read(0, self._size))
        self._objects.put(_name(digest, self._upload), pieces, self._size)
        self._scratch.close()

    def drop(self) -> None:
        self._scratch.close()


class LeafObjects:
    """The leaves below one prefix of a bucket, for one leadership term; see LeafStore."""

    def __init__(
        self, objects: Objects, scratch: Callable[[], Scratch], claims: LeafClaims, term: int
    ) -> None:
        """Begin without open leaves. scratch: makes temporary files on this machine."""
        self._objects, self._scratch, self._claims, self._term = objects, scratch, claims, term
        self._object_names: dict[Digest, str] = {}
        """The names of objects written under this term and seen in the store, keyed by leaf;
        protected by the claims' lock."""
        self._opened: WeakValueDictionary[Digest, OpenLeaf] = WeakValueDictionary()
        self._opening: dict[Digest, threading.Lock] = {}

    def new(self, upload: str) -> _NewObject:
        return _NewObject(self._objects, self._scratch(), upload)

    def signed_puts(self, leaves: Sequence[Digest], upload: str) -> Sequence[str]:
        """Return signed URLs with which these leaves may be written, as part of an upload."""
        return self._objects.signed("PUT", [_name(leaf, upload) for leaf in leaves], VALID_FOR)

    def signed_gets(self, leaves: Sequence[Digest]) -> Sequence[str]:
        """Return signed URLs with which these leaves may be read. Raises MissingBlobError."""
        names = self._map(self._newest, leaves)
        return self._objects.signed("GET", names, VALID_FOR)

    def open(self, digest: Digest) -> OpenLeaf:
        """Download an undamaged copy of a leaf; concurrent readers share it; see LeafStore."""
        with self._fetching(digest):
            leaf = self._opened.get(digest)
            if leaf is None:
                leaf = self._opened[digest] = self._fetched(digest)
            return leaf

    def reliable(self, leaves: Collection[Digest]) -> Collection[Digest]:
        """Return the leaves that were written in this leadership term; see LeafStore."""
        with self._claims.lock:
            return [leaf for leaf in leaves if leaf in self._object_names]

    def keep(self, leaves: Sequence[Digest]) -> bool:
        """Copy leaves of earlier leadership terms to names of this term, so that they are kept."""
        lent = [leaf for leaf in dict.fromkeys(leaves) if leaf not in self._object_names]
        try:
            self._map(self._copy, lent)
        except (IntegrityError, NotFoundError) as error:
            _log.warning("a state cannot be kept", reason=str(error))
            return False
        return True

    def lacking(self, upload: str, sizes: Mapping[Digest, int]) -> set[Digest]:
        objects = self._map(lambda leaf: self._objects.find(_name(leaf, upload)), [*sizes])
        right = {
            leaf: stored.name
            for leaf, stored in zip(sizes, objects, strict=True)
            if stored is not None and stored.num_bytes == sizes[leaf]
        }
        with self._claims.lock:
            self._object_names.update(right)
        return sizes.keys() - right.keys()

    def missing(self, leaves: Sequence[Digest]) -> list[Digest]:
        """Return the leaves of which no object of this leadership term is known."""
        with self._claims.lock:
            return [leaf for leaf in leaves if leaf not in self._object_names]

    def check(self, digest: Digest, upload: str) -> bool:
        stored = self._objects.find(_name(digest, upload))
        return stored is not None and self._is_sound(digest, stored)

    def all_copies(self) -> list[StoredObject]:
        """Return the objects of all leaves that this coordinator may delete."""
        return deletable(self._objects.list(_FOLDER), mark(self._term))

    def collect(
        self,
        copies: Collection[StoredObject],
        named: Collection[Digest],
        under_way: Collection[str],
    ) -> None:
        idle = [stored for stored in copies if _upload_of(stored) not in under_way]
        doomed: list[str] = []
        for digest, group in groupby(sorted(idle, key=lambda stored: stored.name), key=_digest_of):
            of_leaf = list(group)
            spared = self._sound(digest, of_leaf) if digest in named else of_leaf[-1]
            with self._claims.lock:
                if digest in named or self._claims.is_used(digest):
                    of_leaf.remove(spared)
                names = [stored.name for stored in of_leaf]
                if self._object_names.get(digest) in names:
                    del self._object_names[digest]
                    if spared.name not in names and term_of(spared.name) == self._term:
                        self._object_names[digest] = spared.name
                doomed += names
        # Nobody relies on them any more, and no other object will ever have their names.
        for start in range(0, len(doomed), _NUM_DELETED):
            self._objects.delete(doomed[start : start + _NUM_DELETED])

    def _sound(self, digest: Digest, copies: Sequence[StoredObject]) -> StoredObject:
        """Return the newest undamaged copy; copies with equal ETags are not read."""
        newest = copies[-1]
        if all(copy.tag and (copy.tag, copy.num_bytes) == _bytes_of(newest) for copy in copies):
            return newest
        sound = (copy for copy in reversed(copies) if self._is_sound(digest, copy))
        return next(sound, newest)

    def _is_sound(self, digest: Digest, stored: StoredObject) -> bool:
        hasher = hashlib.sha256()
        try:
            for piece in self._objects.read(stored):
                hasher.update(piece)
        except NotFoundError:
            return False
        return hasher.hexdigest() == digest

    def _copies_of(self, digest: Digest) -> list[StoredObject]:
        """Return the objects of a leaf, the newest last. Raises MissingBlobError."""
        listed = self._objects.list(f"{_FOLDER}/{digest}")
        copies = [stored for stored in listed if term_of(stored.name) is not None]
        if not copies:
            raise MissingBlobError(digest)
        return copies

    def _newest(self, digest: Digest) -> str:
        return self._object_names.get(digest) or self._copies_of(digest)[-1].name

    def _copy(self, digest: Digest) -> None:
        """Copy a sound leaf object to a name of this leadership term. Raises MissingBlobError."""
        name = _name(digest, unique_name(self._term))
        try:
            self._objects.copy(self._sound(digest, self._copies_of(digest)).name, name)
        except WrongStateError as error:
            text = "a state of an earlier term has to be copied inside the store (CopyObject)"
            raise WrongStateError(f"{text}, which refuses that: {error}") from error
        with self._claims.lock:
            self._object_names[digest] = name

    def _fetched(self, digest: Digest) -> OpenLeaf:
        is_there = False
        for stored in reversed(self._copies_of(digest)):
            scratch = self._scratch()
            try:
                for piece in self._objects.read(stored):
                    scratch.write(piece)
            except NotFoundError:  # an equal copy has stayed, or another one will be found
                scratch.close()
                continue
            except BaseException:
                scratch.close()
                raise
            is_there = True
            leaf = OpenLeaf.of(digest, scratch.detach(), stored.num_bytes)
            if leaf is not None:
                return leaf
            _log.warning("an object is damaged", name=stored.name)
        if is_there:
            name = f"{_FOLDER}/{digest}/*"
            raise IntegrityError(f"its leaf {name} has other bytes than were written")
        raise MissingBlobError(digest)

    @contextmanager
    def _fetching(self, digest: Digest) -> Iterator[None]:
        """Context manager that lets concurrent readers of a leaf share one download."""
        with self._claims.lock:
            lock = self._opening.setdefault(digest, threading.Lock())
        try:
            with lock:
                yield
        finally:
            self._opening.pop(digest, None)

    def _map(self, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
        if len(items) < 2:
            return [call(item) for item in items]
        with ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="leaves") as pool:
            return list(pool.map(call, items))


def _name(digest: Digest, upload: str) -> str:
    return f"{_FOLDER}/{digest}/{upload}{_SUFFIX}"


def _digest_of(stored: StoredObject) -> Digest:
    return Digest(stored.name.split("/")[1])


def _upload_of(stored: StoredObject) -> str:
    return stored.name.rpartition("/")[2].removesuffix(_SUFFIX)


def _bytes_of(stored: StoredObject) -> tuple[str, int]:
    return stored.tag, stored.num_bytes
