"""Writes a state whose bytes come to the coordinator, in their order, as leaves and their list.

It is the list that workers' leaves of the same state have.
"""

import hashlib

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import LeafStream, leaves_of, list_bytes
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.store.leaves.leaf_store import LeafStore, NewLeaf
from stratagem.coordinator.store.leaves.leaf_upload import DirectUpload


class _Hashed:
    """A leaf that is open, and its SHA-256."""

    def __init__(self, leaf: NewLeaf) -> None:
        self.leaf, self.sha256, self.size = leaf, hashlib.sha256(), 0

    def write(self, data: memoryview) -> None:
        self.leaf.write(data)
        self.sha256.update(data)
        self.size += len(data)


class LeafWriter:
    """One state on its way in: write its data, then commit; or abort."""

    def __init__(self, store: LeafStore, manifest: Manifest, upload: DirectUpload) -> None:
        """Take the upload over: it ends with this."""
        self._store, self._manifest, self._upload = store, manifest, upload
        leaves = leaves_of(manifest)
        self._stream = LeafStream(leaves)
        self._open: dict[int, _Hashed] = {}
        self._digests: list[Digest] = [Digest("")] * len(leaves)

    def write(self, data: memoryview | bytes) -> None:
        """Append data of the state. Any error aborts it."""
        try:
            for number, piece, is_end in self._stream.deal(data):
                if number not in self._open:
                    self._open[number] = _Hashed(self._store.new(self._upload.name))
                self._open[number].write(piece)
                if is_end:
                    self._close(number, self._open.pop(number))
        except BaseException:
            self.abort()
            raise

    def digest(self) -> Digest:
        """Return the digest that the state will have, once all of it has been written."""
        return Digest(hashlib.sha256(list_bytes(self._manifest, self._digests)).hexdigest())

    def commit(self) -> Digest:
        """Make the list durable, and return the digest of the state."""
        try:
            if not self._stream.is_complete:
                raise IntegrityError(
                    f"the state has {self._manifest.total_bytes} bytes; fewer came"
                )
            return self._upload.commit(self._manifest, self._digests)
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop what was begun; leaves that are whole are garbage unless the list names them."""
        for hashed in self._open.values():
            hashed.leaf.drop()
        self._open.clear()
        self._upload.end()

    def _close(self, number: int, hashed: _Hashed) -> None:
        digest = self._digests[number] = Digest(hashed.sha256.hexdigest())
        if digest in self._upload.have:
            hashed.leaf.drop()
            return
        hashed.leaf.keep(digest, self._upload.name)
        self._upload.lacking({digest: hashed.size})
