"""The two places of states in leaves: a folder that workers see, and a bucket that they do not."""

import secrets
from pathlib import Path
from typing import Final

from stratagem.common.base.files import whole_file
from stratagem.common.tensors.leaves import LIST_SUFFIX, StateFolder
from stratagem.coordinator.store.blobs.blob_cache import BlobCache
from stratagem.coordinator.store.blobs.directory_blobs import DirectoryBlobs
from stratagem.coordinator.store.blobs.durable_file import make_folder
from stratagem.coordinator.store.blobs.object_store import Objects
from stratagem.coordinator.store.blobs.shared_blobs import SharedBlobs
from stratagem.coordinator.store.leaves.leaf_blobs import StatePlace
from stratagem.coordinator.store.leaves.leaf_claims import LeafClaims
from stratagem.coordinator.store.leaves.leaf_files import LeafFiles
from stratagem.coordinator.store.leaves.leaf_objects import LeafObjects

LISTS: Final = "lists"
_LIST_CACHE_BYTES: Final = 2**30


def in_folder(root: Path) -> StatePlace:
    """Return the place below a folder, which is made if absent, and gets a name."""
    make_folder(root)
    folder = StateFolder(root)
    if not folder.store_id():
        with whole_file(root / "store-id", mode=0o600) as file:
            file.write(secrets.token_hex(16).encode())
    claims = LeafClaims()
    lists = DirectoryBlobs(root / LISTS, suffix=LIST_SUFFIX)
    return StatePlace(lists, LeafFiles(folder, claims), claims, folder.store_id())


def in_objects(objects: Objects, whole: SharedBlobs, cache_dir: Path, term: int) -> StatePlace:
    """Return the place below a prefix of a bucket, for the coordinator of a term. whole: what is
    one object each there; cache_dir: for local copies of lists."""
    cache = BlobCache(cache_dir, _LIST_CACHE_BYTES)
    lists = SharedBlobs(objects, cache, term, folder=LISTS, suffix=LIST_SUFFIX)
    claims = LeafClaims()
    return StatePlace(lists, LeafObjects(objects, whole.scratch, claims, term), claims)
