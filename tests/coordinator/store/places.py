"""Where blobs and updates can lie, for the tests of what every place promises."""

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import obstore
from obstore.store import MemoryStore

from stratagem.common.base.ids import Digest
from stratagem.common.tensors.manifest import DEFAULT_LIMITS
from stratagem.coordinator.store import bucket
from stratagem.coordinator.store.blobs import BlobStore, DirectoryBlobs
from stratagem.coordinator.store.bucket import Objects
from stratagem.coordinator.store.leaves import LeafBlobs, in_folder, in_objects
from stratagem.coordinator.store.shared_blobs import BlobCache, SharedBlobs
from stratagem.coordinator.updates.spool import SharedSpool, Spool
from tests.coordinator.updates.updates import flip_bit

BUCKET = "stratagem"
MIB = 1 << 20
CONTENT = bytes(range(256)) * 1000
Monotonic = Callable[[], float]


def digest_of(content: bytes) -> Digest:
    return Digest(hashlib.sha256(content).hexdigest())


def put(store: BlobStore, content: bytes, step: int = 1000) -> Digest:
    writer = store.writer(len(content))
    view = memoryview(content)
    for start in range(0, len(view), step):
        writer.write(view[start : start + step])
    return writer.commit()


def read(store: BlobStore, digest: Digest) -> bytes:
    with store.open(digest) as file:
        return file.read()


class Place(Protocol):
    """One store, which several coordinators open one after the other."""

    root: Path
    """Below which lies what it has on this machine."""

    def blobs(self, monotonic: Monotonic = time.monotonic) -> BlobStore:
        """As the next coordinator opens it, on a machine of its own where that is possible."""

    def spool(self) -> Spool:
        """The same of the spool."""

    def damage(self, digest: Digest, at: int) -> None:
        """Flip one bit of a blob."""


@dataclass
class Folder:
    root: Path

    def blobs(self, monotonic: Monotonic = time.monotonic) -> DirectoryBlobs:
        return DirectoryBlobs(self.root / "blobs", monotonic=monotonic)

    def spool(self) -> Spool:
        return Spool(self.root / "spool", quota_bytes=MIB)

    def damage(self, digest: Digest, at: int) -> None:
        flip_bit(self.blobs().path(digest), at)


class LeafFolder(Folder):
    """With states in leaves beside whole files."""

    def blobs(self, monotonic: Monotonic = time.monotonic) -> BlobStore:  # type: ignore[override]
        whole, place = super().blobs(monotonic), in_folder(self.root / "states")
        return LeafBlobs(whole, place, 1, writes_leaves=True, limits=DEFAULT_LIMITS)

    def damage(self, digest: Digest, at: int) -> None:
        Folder(self.root).damage(digest, at)


def environ_of(endpoint: str) -> dict[str, str]:
    """What a coordinator needs to find the test's object store."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
    }


@dataclass
class Bucket:
    """A prefix of its own in a bucket of an S3 server, whose environment must be that of this
    process, or a store in memory."""

    root: Path
    environ: Mapping[str, str]
    memory: MemoryStore | None = None
    url: str = field(default_factory=lambda: f"s3://{BUCKET}/{secrets.token_hex(4)}")
    num_coordinators: int = 0
    _opened: dict[str, Objects] = field(default_factory=dict)

    def objects(self) -> Objects:
        """One for each endpoint, without the trial of it, which is that of test_s3.py."""
        if self.memory is not None:
            return Objects(self.memory, self.url)
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        if endpoint not in self._opened:
            self._opened[endpoint] = Objects(bucket._store(self.url, self.environ), self.url)
        return self._opened[endpoint]

    def names(self, folder: str = "blobs") -> list[str]:
        return [each.name for each in self.objects().list(folder)]

    def cache(self, limit_bytes: int = 64 * MIB) -> BlobCache:
        """An empty one, as on a new machine."""
        return BlobCache(self.root / secrets.token_hex(4), limit_bytes)

    def blobs(
        self, monotonic: Monotonic = time.monotonic, cache: BlobCache | None = None
    ) -> SharedBlobs:
        self.num_coordinators += 1
        cache = cache or self.cache()
        return SharedBlobs(self.objects(), cache, self.num_coordinators, monotonic=monotonic)

    def spool(self, root: Path | None = None, quota_bytes: int = MIB) -> Spool:
        self.num_coordinators += 1
        shared = SharedSpool(self.objects(), self.num_coordinators)
        root = root or self.root / secrets.token_hex(4)
        return Spool(root, quota_bytes=quota_bytes, shared=shared)

    def damage(self, digest: Digest, at: int) -> None:
        self.damage_objects(f"blobs/{digest}", at)

    def damage_objects(self, folder: str, at: int) -> None:
        objects = self.objects()
        for each in objects.list(folder):
            content = bytearray(b"".join(objects.read(each)))
            content[at] ^= 1
            obstore.put(objects._store, each.name, bytes(content))


class LeafBucket(Bucket):
    """The same in a bucket."""

    def blobs(  # type: ignore[override]
        self, monotonic: Monotonic = time.monotonic, cache: BlobCache | None = None
    ) -> LeafBlobs:
        whole, term = super().blobs(monotonic, cache), self.num_coordinators
        place = in_objects(self.objects(), whole, self.root / secrets.token_hex(4), term)
        return LeafBlobs(whole, place, term, writes_leaves=True, limits=DEFAULT_LIMITS)
