"""A blob store that has states in leaves beside whole files, below a data folder or in a bucket.

The name of a state in leaves is the digest of its list, which is a blob like any other: it becomes
durable after all its leaves, and with it the state is there. Lists are collected as blobs are; a
leaf goes when no list that is left names it, no upload relies on it, and no reader has it. Whoever
opens such a state reads the safetensors file that its leaves make.
"""

import weakref
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from stratagem.common.base.errors import IntegrityError, InvalidInputError, LimitError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import LeafList, list_bytes, read_list
from stratagem.common.tensors.manifest import Limits, Manifest
from stratagem.coordinator.store.blobs.blob_store import (
    BlobStore,
    BlobWriter,
    DamagedBlobError,
    MissingBlobError,
)
from stratagem.coordinator.store.blobs.object_store import unique_name
from stratagem.coordinator.store.blobs.temporary_files import Scratch
from stratagem.coordinator.store.blobs.verified_file import BlobFile
from stratagem.coordinator.store.leaves.joined_state import JoinedState
from stratagem.coordinator.store.leaves.leaf_claims import LeafClaims
from stratagem.coordinator.store.leaves.leaf_objects import LeafObjects
from stratagem.coordinator.store.leaves.leaf_store import LeafStore
from stratagem.coordinator.store.leaves.leaf_upload import DirectUpload
from stratagem.coordinator.store.leaves.leaf_writer import LeafWriter

MAX_HAVE: Final = 2**16
"""Leaves that a worker is told to be there: 2 MiB of digests, in a message of at most 4 MiB."""

_log = structlog.get_logger(__name__)


class Lists(BlobStore, Protocol):
    """The blobs that are lists of leaves."""

    def digests(self) -> Iterable[Digest]:
        """Return the digests of all that are there."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where states in leaves are.

    store_id: the name of the folder, which workers see, too; "" for an object store.
    """

    lists: Lists
    leaves: LeafStore
    claims: LeafClaims = field(default_factory=LeafClaims)
    store_id: str = ""


class LeafBlobs:
    """The blobs of a coordinator, with states in leaves. See blob_store.py for the rules."""

    def __init__(
        self, whole: BlobStore, place: StatePlace, term: int, *, writes_leaves: bool, limits: Limits
    ) -> None:
        """whole: of what is one file. writes_leaves: states that come to the coordinator become
        leaves, too."""
        self._whole, self._term, self.limits = whole, term, limits
        self.writes_leaves = writes_leaves
        self.claims, self.leaves, self.store_id = place.claims, place.leaves, place.store_id
        self._lists = place.lists
        self._known: dict[Digest, tuple[Digest, ...]] = {}
        """The leaves of each list that is there."""

    @property
    def signs(self) -> LeafObjects | None:
        """Return what signs requests for leaves; None where workers see a folder of them."""
        return self.leaves if isinstance(self.leaves, LeafObjects) else None

    def writer(self, total_bytes: int) -> BlobWriter:
        """Return a writer for a blob of exactly total_bytes, as one file."""
        return self._whole.writer(total_bytes)

    def state_writer(self, manifest: Manifest, kept: Sequence[Digest]) -> LeafWriter:
        """Return a writer for the data of a state, which become leaves, but for those that the
        states have that are kept."""
        return LeafWriter(self.leaves, manifest, self.upload(kept))

    def upload(self, kept: Sequence[Digest]) -> DirectUpload:
        """Begin an upload, which need not write the leaves of the states that are kept, of so many
        as have a place in a request, the first ones first; a context in which it is under way."""
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
        """Make the list of a state's leaves durable, and return its digest, which names the
        state."""
        content = list_bytes(manifest, leaves)
        writer = self._lists.writer(len(content))
        writer.write(content)
        return writer.commit()

    def scratch(self) -> Scratch:
        """Return a file for bytes that will become part of a blob."""
        return self._whole.scratch()

    def open(self, digest: Digest) -> BlobFile:
        """Open a blob, or the file that a state's leaves make; see BlobStore."""
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
        """Return the list of a state in leaves. Raises MissingBlobError."""
        with self._lists.open(digest) as file:
            return file.read()

    def is_in_leaves(self, digest: Digest) -> bool:
        """Return True when a state is here in leaves."""
        return self._lists.exists(digest)

    def exists(self, digest: Digest) -> bool:
        """Return True when the blob is in the store, whole or damaged."""
        return self._lists.exists(digest) or self._whole.exists(digest)

    def keep(self, digest: Digest) -> bool:
        """Return True when the blob is in the store; it then counts as just written."""
        if self._lists.keep(digest):
            leaves = self._leaves_of(digest)
            return leaves is not None and self.leaves.keep(leaves)
        return self._whole.keep(digest)

    def settle(self, digest: Digest) -> None:
        """Note that the event that names the blob is durable; see BlobStore."""
        self._lists.settle(digest)
        self._whole.settle(digest)

    def make_room(self) -> bool:
        """Delete a local copy of a blob; see BlobStore."""
        return self._whole.make_room()

    def keep_room(self) -> None:
        """Delete local copies while the disk has little room; see BlobStore."""
        self._whole.keep_room()

    def location(self, digest: Digest) -> str:
        """Return the path of the blob's file; "" of a state in leaves, which has none."""
        return self._whole.location(digest)

    def collect(self, live: Container[Digest], grace_s: float) -> list[Digest]:
        """Delete the blobs that are not in `live`, and return them; then leaves that nothing needs
        any more. See BlobStore."""
        collected = self._whole.collect(live, grace_s) + self._lists.collect(live, grace_s)
        # In this order: what is written meanwhile is not found; and of each upload that has written
        # what is found either the list is there by now, or it is one of those under way.
        found = self.leaves.found()
        for digest in self._lists.digests():  # read what is new without the lock
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
            self._known = {digest: self._known[digest] for digest in present}
        self.leaves.collect(found, named, under_way)
        return collected

    def _leaves_of(self, digest: Digest) -> tuple[Digest, ...] | None:
        """Return the leaves of a state; None where there is no list of it that can be read."""
        if digest not in self._known or not self._lists.exists(digest):
            try:
                listed = self._list(digest)
            except IntegrityError:
                listed = None
            if listed is None:
                return None
            self._known[digest] = listed.digests
        return self._known[digest]

    def _list(self, digest: Digest) -> LeafList | None:
        """Read the list of a state; None where there is none."""
        try:
            content = self.list_of(digest)
        except MissingBlobError:
            return None
        try:
            return read_list(content, digest, self.limits)
        except (InvalidInputError, LimitError) as error:
            raise DamagedBlobError(digest) from error
