"""LeafBlobs is a blob store that also holds states as leaves: pieces named by digest, which equal
states share. Leaves are in a data folder or a bucket.

The name of a state in leaves is the digest of its list, which is a blob like any other. The list
becomes durable after all its leaves, which completes the state. Lists are collected as blobs are; a
leaf is deleted when no remaining list names it, no upload relies on it, and no reader has it. A
reader of such a state gets the safetensors file that its leaves make.
"""

import hashlib
import secrets
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

import structlog

from stratagem.common.base.errors import IntegrityError, InvalidInputError, LimitError
from stratagem.common.base.files import whole_file
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import (
    LIST_SUFFIX,
    LeafList,
    LeafStream,
    StateFolder,
    leaves_of,
    list_bytes,
    places_of,
    read_list,
)
from stratagem.common.tensors.manifest import Limits, Manifest
from stratagem.common.tensors.stream import piece_bytes
from stratagem.coordinator.store.blobs import (
    BlobStore,
    BlobWriter,
    DamagedBlobError,
    DirectoryBlobs,
    MissingBlobError,
)
from stratagem.coordinator.store.bucket import Objects, unique_name
from stratagem.coordinator.store.files import BlobFile, Scratch, make_folder
from stratagem.coordinator.store.leaf_files import (
    LeafClaims,
    LeafFiles,
    LeafStore,
    NewLeaf,
    OpenLeaf,
)
from stratagem.coordinator.store.leaf_objects import LeafObjects
from stratagem.coordinator.store.shared_blobs import BlobCache, SharedBlobs

# ---- Uploads ----
#
# The files that an upload writes are protected from collection until it ends.

WriteList = Callable[[Manifest, Sequence[Digest]], Digest]
"""Makes the list of a state's leaves durable, and returns the list's digest."""


class DirectUpload:
    """An upload of leaves, from before the first leaf is written until the state is complete. Its
    leaves are not collected meanwhile."""

    def __init__(
        self,
        name: str,
        have: frozenset[Digest],
        leaves: LeafStore,
        claims: LeafClaims,
        write_list: WriteList,
    ) -> None:
        """Begin an upload. have: the leaves that are in the store already, and stay until the
        upload ends."""
        self.name, self.have = name, have
        self._leaves, self._claims, self._write_list = leaves, claims, write_list
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the upload: nothing more is written, and leaves that no list names become garbage."""
        if not self._is_over:
            self._is_over = True
            self._claims.end(self.name, self.have)

    def check(self, leaf: Digest) -> bool:
        """Read a leaf that this upload wrote; return True if its bytes match its digest."""
        return self._leaves.check(leaf, self.name)

    def lacking(self, sizes: Mapping[Digest, int]) -> set[Digest]:
        """Return the leaves that this upload has not written with their expected size."""
        return self._leaves.lacking(self.name, sizes)

    def commit(self, manifest: Manifest, leaves: Sequence[Digest]) -> Digest:
        """Make the list of the state's leaves durable, and return the state's digest. Raises
        IntegrityError if a leaf is missing."""
        missing = self._leaves.missing(leaves)
        if missing:
            raise IntegrityError(f"{len(missing)} leaves of a state are not there: {missing[0]}")
        return self._write_list(manifest, leaves)


# ---- Writer ----
#
# A state whose bytes come to the coordinator is written, in their order, as leaves and their
# list. The list is the same as for workers' leaves of that state.


class LeafWriter:
    """Writes a state as leaves: write its data in order, then commit; or abort."""

    def __init__(self, store: LeafStore, manifest: Manifest, upload: DirectUpload) -> None:
        """Take over an upload of leaves, which ends with this writer."""
        self._store, self._manifest, self._upload = store, manifest, upload
        self._leaves = leaves_of(manifest)
        self._stream = LeafStream(self._leaves)
        self._open: dict[int, tuple[NewLeaf, Any]] = {}
        """The unfinished leaves, with their running SHA-256, keyed by number."""
        self._digests: list[Digest] = [Digest("")] * len(self._leaves)

    def write(self, data: memoryview | bytes) -> None:
        """Append data of the state. Any error aborts the state."""
        try:
            for number, piece, is_end in self._stream.deal(data):
                if number not in self._open:
                    self._open[number] = self._store.new(self._upload.name), hashlib.sha256()
                leaf, sha256 = self._open[number]
                leaf.write(piece)
                sha256.update(piece)
                if is_end:
                    del self._open[number]
                    self._close(number, leaf, Digest(sha256.hexdigest()))
        except BaseException:
            self.abort()
            raise

    def digest(self) -> Digest:
        """Return the digest of the state, once all of its data has been written."""
        return Digest(hashlib.sha256(list_bytes(self._manifest, self._digests)).hexdigest())

    def commit(self) -> Digest:
        """Make the list of leaves durable, and return the digest of the state."""
        try:
            if not self._stream.is_complete:
                raise IntegrityError(
                    f"the state has {self._manifest.total_bytes} bytes; fewer came"
                )
            return self._upload.commit(self._manifest, self._digests)
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop unfinished leaves; finished leaves become garbage unless the list names them."""
        for leaf, _ in self._open.values():
            leaf.drop()
        self._open.clear()
        self._upload.end()

    def _close(self, number: int, leaf: NewLeaf, digest: Digest) -> None:
        self._digests[number] = digest
        if digest in self._upload.have:
            leaf.drop()
            return
        leaf.keep(digest)
        self._upload.lacking({digest: self._leaves[number].size})


# ---- Store ----

MAX_HAVE: Final = 2**16
"""The most leaves that a worker may skip: 2 MiB of digests, in a message of at most 4 MiB."""

_log = structlog.get_logger(__name__)


class Lists(BlobStore, Protocol):
    """The store of lists of leaves; every list is a blob that completes one state."""

    def digests(self) -> Iterable[Digest]:
        """Return the digests of all stored lists."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The stores for states in leaves: one for their lists, and one for the leaves.

    store_id: the name of the folder, which workers see, too; "" for an object store.
    """

    lists: Lists
    leaves: LeafStore
    claims: LeafClaims = field(default_factory=LeafClaims)
    store_id: str = ""


class LeafBlobs:
    """The coordinator's blob store, with states in leaves. See blobs.py for the rules."""

    def __init__(
        self, whole: BlobStore, place: StatePlace, term: int, *, writes_leaves: bool, limits: Limits
    ) -> None:
        """Open the stores. whole: the store of blobs that are one file. writes_leaves: also store
        states that come to the coordinator as leaves."""
        self._whole, self._term, self.limits = whole, term, limits
        self.writes_leaves = writes_leaves
        self.claims, self.leaves, self.store_id = place.claims, place.leaves, place.store_id
        self._lists = place.lists
        self._listed_leaves: dict[Digest, tuple[Digest, ...]] = {}
        """The leaves that each stored list names, keyed by the list's digest."""

    @property
    def signs(self) -> LeafObjects | None:
        """Return the store that signs requests for leaves; None if workers see their folder."""
        return self.leaves if isinstance(self.leaves, LeafObjects) else None

    def writer(self, total_bytes: int) -> BlobWriter:
        """Return a writer for a blob of exactly total_bytes, as one file."""
        return self._whole.writer(total_bytes)

    def state_writer(self, manifest: Manifest, kept: Sequence[Digest]) -> LeafWriter:
        """Return a writer for the data of a state, which reuses leaves of the kept states."""
        return LeafWriter(self.leaves, manifest, self.upload(kept))

    def upload(self, kept: Sequence[Digest]) -> DirectUpload:
        """Begin an upload that reuses leaves of the kept states, the first states first, as many
        leaves as fit into a message. The upload is in progress until its context ends."""
        name = unique_name(self._term)
        with self.claims.lock:
            leaves: dict[Digest, None] = {}
            for state in kept:
                leaves |= dict.fromkeys(self._leaves_of(state) or ())
                if len(leaves) >= MAX_HAVE:
                    break
            have = frozenset(list(self.leaves.reliable(leaves))[:MAX_HAVE])
            self.claims.begin(name, have)
        return DirectUpload(name, have, self.leaves, self.claims, self.write_list)

    def write_list(self, manifest: Manifest, leaves: Sequence[Digest]) -> Digest:
        """Make the list of a state's leaves durable; return its digest, which names the state."""
        content = list_bytes(manifest, leaves)
        writer = self._lists.writer(len(content))
        writer.write(content)
        return writer.commit()

    def scratch(self) -> Scratch:
        return self._whole.scratch()

    def open(self, digest: Digest) -> BlobFile:
        """Open a blob or, for a state in leaves, the file that its leaves make; see BlobStore."""
        with self.claims.lock:
            listed = self._list(digest)
            if listed is not None:
                self.claims.use(listed.digests)
        if listed is None:
            return self._whole.open(digest)
        state = JoinedState(digest, listed, self.leaves.open)
        weakref.finalize(state, self.claims.release, listed.digests)
        return BlobFile(state)

    def list_of(self, digest: Digest) -> bytes:
        """Return the encoded list of a state's leaves. Raises MissingBlobError."""
        with self._lists.open(digest) as file:
            return file.read()

    def is_in_leaves(self, digest: Digest) -> bool:
        """Return True if a state is stored here as leaves."""
        return self._lists.exists(digest)

    def exists(self, digest: Digest) -> bool:
        return self._lists.exists(digest) or self._whole.exists(digest)

    def keep(self, digest: Digest) -> bool:
        if self._lists.keep(digest):
            leaves = self._leaves_of(digest)
            return leaves is not None and self.leaves.keep(leaves)
        return self._whole.keep(digest)

    def settle(self, digest: Digest) -> None:
        self._lists.settle(digest)
        self._whole.settle(digest)

    def make_room(self) -> bool:
        return self._whole.make_room()

    def keep_room(self) -> None:
        self._whole.keep_room()

    def location(self, digest: Digest) -> str:
        """Return the path of the blob's file; "" for a state in leaves, which has none."""
        return self._whole.location(digest)

    def collect(self, live: Container[Digest], grace_s: float) -> list[Digest]:
        """Delete the blobs that are not in `live`, and return their digests; then delete unneeded
        leaves. See BlobStore."""
        collected = self._whole.collect(live, grace_s) + self._lists.collect(live, grace_s)
        # In this order: leaves that are written meanwhile are not among the copies; and each upload
        # that wrote one of them either has its list by now, or is among those under way.
        copies = self.leaves.all_copies()
        for digest in self._lists.digests():  # read new lists without the lock
            self._leaves_of(digest)
        with self.claims.lock:
            under_way, used = self.claims.present()
            named = set(used)
            for digest in (present := list(self._lists.digests())):
                leaves = self._leaves_of(digest)
                if leaves is None:
                    _log.warning("no leaves are collected: a list cannot be read", digest=digest)
                    return collected
                named.update(leaves)
            self._listed_leaves = {digest: self._listed_leaves[digest] for digest in present}
        self.leaves.collect(copies, named, under_way)
        return collected

    def _leaves_of(self, digest: Digest) -> tuple[Digest, ...] | None:
        """Return the leaves of a state; None if its list cannot be read."""
        if digest not in self._listed_leaves or not self._lists.exists(digest):
            try:
                listed = self._list(digest)
            except IntegrityError:
                listed = None
            if listed is None:
                return None
            self._listed_leaves[digest] = listed.digests
        return self._listed_leaves[digest]

    def _list(self, digest: Digest) -> LeafList | None:
        """Read the list of a state's leaves; None if there is none."""
        try:
            content = self.list_of(digest)
        except MissingBlobError:
            return None
        try:
            return read_list(content, digest, self.limits)
        except (InvalidInputError, LimitError) as error:
            raise DamagedBlobError(digest) from error


# ---- Reading ----
#
# The safetensors file that the leaves of a state make can be read at any offset.

_NUM_OPEN: Final = 4


class JoinedState:
    """The bytes of a state in leaves, as one file. A leaf is opened, and verified, when read."""

    is_in_leaves = True

    def __init__(
        self, digest: Digest, listed: LeafList, open_leaf: Callable[[Digest], OpenLeaf]
    ) -> None:
        self._digest, self._listed, self._open_leaf = digest, listed, open_leaf
        self._places = places_of(leaves_of(listed.manifest))
        self._at = 0
        """The index of the place that was read last; the next read is usually near it."""
        self._open: dict[int, OpenLeaf] = {}
        self.num_bytes = len(listed.header) + listed.manifest.total_bytes

    def read_into(self, view: memoryview, offset: int) -> None:
        num_head = len(self._listed.header)
        head = self._listed.header[offset : offset + len(view)]
        view[: len(head)] = head
        done = len(head)
        while done < len(view):
            self._seek(offset + done - num_head)
            place = self._places[self._at]
            skipped = offset + done - num_head - place.offset
            size = min(place.size - skipped, len(view) - done)
            self._leaf(place.leaf).read_into(view[done : done + size], place.start + skipped)
            done += size

    def source(self, offset: int) -> Iterator[bytes]:
        """Yield the checked data from an offset on, in pieces that end where chunks end."""
        total_bytes = self._listed.manifest.total_bytes
        length = piece_bytes(total_bytes)
        while offset < total_bytes:
            piece = bytearray(min(length - offset % length, total_bytes - offset))
            self.read_into(memoryview(piece), len(self._listed.header) + offset)
            offset += len(piece)
            yield bytes(piece)

    def offer(self) -> None:
        """Return None: the state is in many files, so none can be offered to another process."""

    def check(self, offset: int, frame: bytes) -> None:
        """Do nothing: the source has checked the bytes."""

    def _seek(self, offset: int) -> None:
        """Move to the place that contains this byte of the data."""
        if offset < self._places[self._at].offset:
            self._at = 0
        while offset >= self._places[self._at].offset + self._places[self._at].size:
            self._at += 1

    def _leaf(self, number: int) -> OpenLeaf:
        leaf = self._open.get(number)
        if leaf is None:
            named = self._listed.digests[number]
            try:
                leaf = self._open_leaf(named)
            except IntegrityError as error:
                raise DamagedBlobError(self._digest, str(error)) from error
            except MissingBlobError as error:
                raise DamagedBlobError(self._digest, f"its leaf {named} is not there") from error
            while len(self._open) >= _NUM_OPEN:
                del self._open[next(iter(self._open))]
            self._open[number] = leaf
        return leaf


# ---- Places ----
#
# States in leaves have two places: a folder that workers see, and a bucket that they do not see.

LISTS: Final = "lists"
_LIST_CACHE_BYTES: Final = 2**30


def in_folder(root: Path) -> StatePlace:
    """Return the stores for leaves in a folder, which is made if absent and gets a store id."""
    make_folder(root)
    folder = StateFolder(root)
    if not folder.store_id():
        with whole_file(root / "store-id", mode=0o600) as file:
            file.write(secrets.token_hex(16).encode())
    claims = LeafClaims()
    lists = DirectoryBlobs(root / LISTS, suffix=LIST_SUFFIX)
    return StatePlace(lists, LeafFiles(folder, claims), claims, folder.store_id())


def in_objects(objects: Objects, whole: SharedBlobs, cache_dir: Path, term: int) -> StatePlace:
    """Return the stores for leaves below a prefix of a bucket, for a coordinator's leadership term.
    whole: the blobs there that are one object each; cache_dir: for local copies of lists."""
    cache = BlobCache(cache_dir, _LIST_CACHE_BYTES)
    lists = SharedBlobs(objects, cache, term, folder=LISTS, suffix=LIST_SUFFIX)
    claims = LeafClaims()
    return StatePlace(lists, LeafObjects(objects, whole.scratch, claims, term), claims)
