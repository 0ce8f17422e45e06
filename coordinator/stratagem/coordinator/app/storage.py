"""The storage of blobs and updates: local folders of the coordinator, or an object store.

Opened before the lead is taken: wrong keys are to be found when a standby starts, not when it has
to take over. What the stores then do is bound to the term of the lead.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import structlog

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.tensors.manifest import Limits
from stratagem.coordinator.runtime.settings import Settings
from stratagem.coordinator.store.blobs.blob_cache import BlobCache, default_limit_bytes
from stratagem.coordinator.store.blobs.blob_store import BlobStore
from stratagem.coordinator.store.blobs.directory_blobs import DirectoryBlobs
from stratagem.coordinator.store.blobs.durable_file import MakeRoom, no_room
from stratagem.coordinator.store.blobs.object_store import Objects
from stratagem.coordinator.store.blobs.s3 import SETTING, open_s3
from stratagem.coordinator.store.blobs.shared_blobs import SharedBlobs
from stratagem.coordinator.store.leaves.leaf_blobs import LeafBlobs
from stratagem.coordinator.store.leaves.state_places import LISTS, in_folder, in_objects
from stratagem.coordinator.updates.shared_spool import SharedSpool
from stratagem.coordinator.updates.spool import Spool

FOLDER: Final = "states"
"""Below the data folder, of states in leaves."""
_OWNER: Final = "journal"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Storage:
    """The places for blobs and updates; objects is None where everything is stored below
    data_dir."""

    data_dir: Path
    objects: Objects | None
    cache_bytes: int | None
    """Limit of the local cache; None: derived from the size of the disk."""
    spool_bytes: int
    writes_leaves: bool
    """States become leaves; those that are leaves are read in any case."""
    limits: Limits
    """Of a state."""

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Open the storage that the settings name. Raises InvalidInputError, with a remedy, for an
        object store that cannot be used."""
        writes_leaves, objects = settings.state_path == "direct", None
        if settings.blob_store:
            objects = open_s3(settings.blob_store, os.environ, signs=writes_leaves)
        if objects is not None:
            _log.info("blobs and updates are in an object store", url=objects.url)
        data_dir = settings.data_dir
        return cls(
            data_dir,
            objects,
            settings.blob_cache_bytes,
            settings.max_spool_bytes,
            writes_leaves,
            Limits(
                max_tensors=settings.max_state_tensors, max_total_bytes=settings.max_state_bytes
            ),
        )

    def claim(self, journal: str) -> None:
        """Mark the object store as that of a journal.

        Raises InvalidInputError where it is another one's: what that names is garbage to this one.
        """
        if self.objects is None:
            return
        mine = f"{_OWNER}/{journal}"
        names = {stored.name for stored in self.objects.list(_OWNER)}
        if others := sorted(names - {mine}):
            raise InvalidInputError.at(
                SETTING,
                f"{self.objects.url} holds the states of another journal ({others[0]}); name "
                "another prefix. If that journal is gone for good, delete all below this prefix",
            )
        if mine not in names:
            self.objects.put(mine, [b""], 0)

    def blobs(self, term: int) -> BlobStore:
        """Return the blob store for the leader of a term."""
        if self.writes_leaves or self._has_leaves():
            return self.leaves(term)
        return self._whole(term)

    def leaves(self, term: int) -> LeafBlobs:
        """Return the blob store that has states in leaves, too."""
        whole = self._whole(term)
        if self.objects is not None and isinstance(whole, SharedBlobs):
            place = in_objects(self.objects, whole, self.data_dir / "list-cache", term)
        else:
            place = in_folder(self.data_dir / FOLDER)
        return LeafBlobs(whole, place, term, writes_leaves=self.writes_leaves, limits=self.limits)

    def _has_leaves(self) -> bool:
        if self.objects is None:
            return (self.data_dir / FOLDER).is_dir()
        return bool(self.objects.list(LISTS))

    def _whole(self, term: int) -> DirectoryBlobs | SharedBlobs:
        if self.objects is None:
            return DirectoryBlobs(self.data_dir / "blobs")
        limit_bytes = self.cache_bytes or default_limit_bytes(self.data_dir)
        cache = BlobCache(self.data_dir / "blob-cache", limit_bytes)
        return SharedBlobs(self.objects, cache, term)

    def spool(self, term: int, make_room: MakeRoom = no_room) -> Spool:
        """Return the spool of the updates of open rounds, for the leader of a term; make_room frees
        space among its blobs, on the same disk."""
        shared = SharedSpool(self.objects, term) if self.objects is not None else None
        return Spool(
            self.data_dir / "spool",
            quota_bytes=self.spool_bytes,
            shared=shared,
            make_room=make_room,
        )
