"""Writes a state whose bytes come to the coordinator, in their order, as leaves and their list.

It is the list that workers' leaves of the same state have.
"""

import hashlib
import os
import secrets
from pathlib import Path

from stratagem.common.base.errors import IntegrityError
from stratagem.common.base.ids import Digest
from stratagem.common.files.state_folder import StateFolder
from stratagem.common.tensors.manifest import Manifest
from stratagem.common.tensors.state_leaves import LeafStream, leaves_of, list_bytes
from stratagem.coordinator.store.blobs.durable_file import (
    DurableFile,
    space_needed,
    sync_folder,
)
from stratagem.coordinator.store.leaves.leaf_upload import DirectUpload


class _NewLeaf:
    def __init__(self, path: Path) -> None:
        with space_needed():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.path, self.file = path, DurableFile(descriptor)
        self.sha256 = hashlib.sha256()

    def write(self, data: memoryview) -> None:
        self.file.write(data)
        self.sha256.update(data)

    def drop(self) -> None:
        self.file.close()
        self.path.unlink(missing_ok=True)


class LeafWriter:
    """One state on its way in: write its data, then commit; or abort."""

    def __init__(self, folder: StateFolder, manifest: Manifest, upload: DirectUpload) -> None:
        """Take the upload over: it ends with this."""
        self._folder, self._manifest, self._upload = folder, manifest, upload
        leaves = leaves_of(manifest)
        self._stream = LeafStream(leaves)
        self._open: dict[int, _NewLeaf] = {}
        self._digests: list[Digest] = [Digest("")] * len(leaves)

    def write(self, data: memoryview | bytes) -> None:
        """Append data of the state. Any error aborts it."""
        try:
            for number, piece, is_end in self._stream.deal(data):
                if number not in self._open:
                    name = f"{self._upload.name}-{secrets.token_hex(8)}"
                    self._open[number] = _NewLeaf(self._folder.temporary / name)
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
        for leaf in self._open.values():
            leaf.drop()
        self._open.clear()
        self._upload.end()

    def _close(self, number: int, leaf: _NewLeaf) -> None:
        digest = self._digests[number] = Digest(leaf.sha256.hexdigest())
        if digest in self._upload.have:
            leaf.drop()
            return
        leaf.file.sync()
        leaf.file.close()
        path = self._folder.leaves / digest[:2] / f"{digest}-{self._upload.name}"
        with space_needed():
            leaf.path.rename(path)
            sync_folder(path.parent)
