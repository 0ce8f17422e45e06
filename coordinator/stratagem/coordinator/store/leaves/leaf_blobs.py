"""A blob store that has states in leaves beside whole files, below one data folder.

The name of a state in leaves is the digest of its list, which is a blob like any other: it becomes
durable after all its leaves, and with it the state is there. Lists are collected as blobs are; a
leaf goes when no list that is left names it, no upload relies on it, and no reader has it. Whoever
opens such a state reads the safetensors file that its leaves make.
"""

import secrets
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import structlog

from stratagem.common.base.errors import IntegrityError, InvalidInputError, LimitError
from stratagem.common.base.ids import Digest
from stratagem.common.files.atomic_file import whole_file
from stratagem.common.files.state_folder import LIST_SUFFIX, StateFolder
from stratagem.common.tensors.manifest import Limits, Manifest
from stratagem.common.tensors.state_leaves import LeafList, list_bytes, read_list
from stratagem.coordinator.store.blobs.blob_store import (
    BlobWriter,
    DamagedBlobError,
    MissingBlobError,
)
from stratagem.coordinator.store.blobs.directory_blobs import DirectoryBlobs
from stratagem.coordinator.store.blobs.durable_file import make_folder
from stratagem.coordinator.store.blobs.object_store import unique_name
from stratagem.coordinator.store.blobs.temporary_files import Scratch
from stratagem.coordinator.store.blobs.verified_file import BlobFile
from stratagem.coordinator.store.leaves.joined_state import JoinedState
from stratagem.coordinator.store.leaves.leaf_claims import LeafClaims
from stratagem.coordinator.store.leaves.leaf_files import LeafFiles
from stratagem.coordinator.store.leaves.leaf_upload import DirectUpload
from stratagem.coordinator.store.leaves.leaf_writer import LeafWriter

FOLDER: Final = "states"
MAX_HAVE: Final = 2**16
"""Leaves that a worker is told to be there: 2 MiB of digests, in a message of at most 4 MiB."""

_log = structlog.get_logger(__name__)


class LeafBlobs:
    """The blobs below a data folder, with states in leaves. See blob_store.py for the rules."""

    def __init__(
        self, whole: DirectoryBlobs, root: Path, term: int, *, writes_leaves: bool, limits: Limits
    ) -> None:
        """writes_leaves: states that come to the coordinator become leaves, too."""
        self._whole, self._term, self.limits = whole, term, limits
        self.writes_leaves = writes_leaves
        make_folder(root)
        self._folder = StateFolder(root)
        self.claims = LeafClaims()
        self.files = LeafFiles(self._folder, self.claims)
        self._lists = DirectoryBlobs(root / "lists", suffix=LIST_SUFFIX)
        self._known: dict[Digest, tuple[Digest, ...]] = {}
        """The leaves of each list that is there."""
        if not self._folder.store_id():
            with whole_file(root / "store-id", mode=0o600) as file:
                file.write(secrets.token_hex(16).encode())
        self.store_id = self._folder.store_id()

    def writer(self, total_bytes: int) -> BlobWriter:
        """Return a writer for a blob of exactly total_bytes, as one file."""
        return self._whole.writer(total_bytes)

    def state_writer(self, manifest: Manifest, kept: Sequence[Digest]) -> LeafWriter:
        """Return a writer for the data of a state, which become leaves, but for those that the
        states have that are kept."""
        return LeafWriter(self._folder, manifest, self.upload(kept))

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
            have = frozenset(list(leaves)[:MAX_HAVE])
            self.claims.begin(name, have)
        return DirectUpload(name, have, self.files, self.claims, self.write_list)

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
        state = JoinedState(digest, listed, self.files.open)
        weakref.finalize(state, self.claims.release, listed.digests)
        return BlobFile(state)

    def is_in_leaves(self, digest: Digest) -> bool:
        """Return True when a state is here in leaves."""
        return self._lists.exists(digest)

    def exists(self, digest: Digest) -> bool:
        """Return True when the blob is in the store, whole or damaged."""
        return self._lists.exists(digest) or self._whole.exists(digest)

    def keep(self, digest: Digest) -> bool:
        """Return True when the blob is in the store; it then counts as just written."""
        return self._lists.keep(digest) or self._whole.keep(digest)

    def settle(self, digest: Digest) -> None:
        """Note that the event that names the blob is durable; see BlobStore."""
        self._lists.settle(digest)
        self._whole.settle(digest)

    def make_room(self) -> bool:
        """Return False: every blob here is needed."""
        return False

    def keep_room(self) -> None:
        """Do nothing: every blob here is needed."""

    def location(self, digest: Digest) -> str:
        """Return the path of the blob's file; "" of a state in leaves, which has none."""
        return self._whole.location(digest)

    def collect(self, live: Collection[Digest], grace_s: float) -> list[Digest]:
        """Delete the blobs that are not in `live`, and return them; then leaves that nothing needs
        any more. See BlobStore."""
        collected = self._whole.collect(live, grace_s) + self._lists.collect(live, grace_s)
        # In this order: what is written meanwhile is not found; and of each upload that has written
        # what is found either the list is there by now, or it is one of those under way.
        found = self.files.files()
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
        self.files.collect(found, named, under_way)
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
            file = self._lists.open(digest)
        except MissingBlobError:
            return None
        with file:
            content = file.read()
        try:
            return read_list(content, digest, self.limits)
        except (InvalidInputError, LimitError) as error:
            raise DamagedBlobError(digest) from error
