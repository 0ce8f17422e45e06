"""A round whose updates are spooled and folded."""

from pathlib import Path

from stratagem.common.tensors.manifest import Manifest
from stratagem.common.tensors.safetensors_file import blob_digest, header_bytes, read_header
from stratagem.coordinator.store.blobs.blob_store import BlobWriter
from stratagem.coordinator.store.blobs.directory_blobs import DirectoryBlobs
from stratagem.coordinator.updates.folding.fold import (
    fold_weighted_mean,
)
from stratagem.coordinator.updates.spool import Spool
from tests.coordinator.updates.updates import (
    MIXED,
    OF_RUN,
    ROOT,
    accept,
    data_of,
    manifest_of,
)

MANIFEST = manifest_of(MIXED, metadata={"step": "4"})
FOLDER = (OF_RUN, ROOT, 1)
"""Of the round in the spool."""


class Round:
    def __init__(self, root: Path, manifest: Manifest = MANIFEST) -> None:
        self.manifest = manifest
        self.spool = Spool(root / "spool", quota_bytes=1 << 30)
        self.store = DirectoryBlobs(root / "blobs")
        self.root = root

    def writer(self) -> BlobWriter:
        return self.store.writer(len(header_bytes(self.manifest)) + self.manifest.total_bytes)

    def fold(self, weights: list[int], order: list[int] | None = None) -> bytes:
        """Clients 0, 1, … come in the given order, are folded in theirs; the data of the mean."""
        for client in order or range(len(weights)):
            accept(self.spool, client, self.manifest, data_of(self.manifest, client))
        entries = list(self.spool.entries(*FOLDER).values())
        digest, *_ = fold_weighted_mean(entries, weights, self.manifest, self.writer())
        found, start = read_header(self.store.path(digest))
        assert found.stored() == self.manifest.stored()
        assert dict(found.metadata) == dict(self.manifest.metadata)
        data = self.store.path(digest).read_bytes()[start:]
        assert digest == blob_digest(self.manifest, [data])
        return data

    def leftovers(self) -> list[Path]:
        return [path for path in (self.root / "blobs").rglob("*") if path.is_file()]
