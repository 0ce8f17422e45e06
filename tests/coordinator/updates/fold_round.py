"""A round whose updates are spooled and folded."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stratagem.common.base.ids import Digest
from stratagem.common.tensors.files import blob_digest, header_bytes, read_header
from stratagem.common.tensors.manifest import Manifest
from stratagem.coordinator.store.blobs import BlobWriter, DirectoryBlobs
from stratagem.coordinator.updates.fold import Folded, fold_weighted_mean
from stratagem.coordinator.updates.reading import StateReader, open_state
from stratagem.coordinator.updates.spool import Spool
from stratagem.coordinator.updates.upload import SpoolEntry
from tests.coordinator.updates.updates import MIXED, OF_RUN, ROOT, accept, data_of, manifest_of

MANIFEST = manifest_of(MIXED, metadata={"step": "4"})
FOLDER = (OF_RUN, ROOT, 1)
"""Of the round in the spool."""
BASE = 1000
"""Seed of the state that a round begins from, where it has one."""


class Round:
    def __init__(self, root: Path, manifest: Manifest = MANIFEST) -> None:
        self.manifest = manifest
        self.spool = Spool(root / "spool", quota_bytes=1 << 30)
        self.store = DirectoryBlobs(root / "blobs")
        self.root = root
        self.base = Digest("")
        self.last: Folded | None = None

    def writer(self) -> BlobWriter:
        return self.store.writer(len(header_bytes(self.manifest)) + self.manifest.total_bytes)

    def stored(self, data: bytes) -> Digest:
        """A state of these data."""
        writer = self.writer()
        writer.write(header_bytes(self.manifest))
        writer.write(data)
        return writer.commit()

    def begin(self, data: bytes = b"") -> None:
        """Store the state that the round begins from."""
        self.base = self.stored(data or data_of(self.manifest, BASE))

    @contextmanager
    def opened(self) -> Iterator[tuple[Manifest, StateReader]]:
        """The state that the round began from."""
        with ExitStack() as files:
            yield open_state(files, self.store, self.base)

    def accepted(self, num: int, order: Sequence[int] = ()) -> list[SpoolEntry]:
        """Clients 0, 1, … come in the given order; their updates in theirs."""
        for client in order or range(num):
            accept(self.spool, client, self.manifest, data_of(self.manifest, client))
        return self.entries()

    def entries(self) -> list[SpoolEntry]:
        return [entry for _, entry in sorted(self.spool.entries(*FOLDER).items())]

    def folded(
        self, entries: Sequence[SpoolEntry], weights: Sequence[float], **options: Any
    ) -> bytes:
        """The data of the next state."""
        self.last = fold_weighted_mean(entries, weights, self.manifest, self.writer(), **options)
        return self.data(self.last.state)

    def fold(self, weights: Sequence[float], order: Sequence[int] = ()) -> bytes:
        return self.folded(self.accepted(len(weights), order), weights)

    def data(self, digest: Digest) -> bytes:
        found, start = read_header(self.store.path(digest))
        assert found.stored() == self.manifest.stored()
        assert dict(found.metadata) == dict(self.manifest.metadata)
        data = self.store.path(digest).read_bytes()[start:]
        assert digest == blob_digest(self.manifest, [data])
        return data

    def leftovers(self) -> list[Path]:
        return [path for path in (self.root / "blobs").rglob("*") if path.is_file()]
