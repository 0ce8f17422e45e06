"""The states of all runs: content-addressed blobs.

    store.py      what a store promises, and how a blob is written
    directory.py  blobs as files under one folder
    objects.py    objects below a prefix of a bucket; s3.py opens one, credentials.py has the keys
    cache.py      local copies, up to a number of bytes
    shared.py     blobs as objects that several coordinators share
    verified.py   blobs as open files, of which every byte is checked when it is read
    durable.py    files that are hashed while they are written and survive a power cut
    temporary.py  files that vanish with their writer

Knows bytes and digests. What a blob holds is the business of `stratagem.common.tensors.safefile`.
"""

from stratagem.coordinator.blobs.directory import DirectoryBlobs
from stratagem.coordinator.blobs.shared import SharedBlobs
from stratagem.coordinator.blobs.store import (
    BlobStore,
    BlobWriter,
    DamagedBlobError,
    MissingBlobError,
)
from stratagem.coordinator.blobs.temporary import Scratch
from stratagem.coordinator.blobs.verified import BlobFile

__all__ = [
    "BlobFile",
    "BlobStore",
    "BlobWriter",
    "DamagedBlobError",
    "DirectoryBlobs",
    "MissingBlobError",
    "Scratch",
    "SharedBlobs",
]
