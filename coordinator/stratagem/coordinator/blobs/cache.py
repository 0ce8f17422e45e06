"""Local copies of blobs that lie elsewhere, up to a number of bytes.

A copy is verified once, like any blob in a folder; one that is damaged is forgotten, and the blob
is fetched again. The copy that was used least recently goes first. Its file stays readable for
those who have it open, and a crash leaves whole copies or none. So the limit may be passed by what
is open, and by the newest copy, which always stays.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import BinaryIO

import structlog

from stratagem.common.errors import IntegrityError, NotFoundError
from stratagem.common.ids import Digest
from stratagem.coordinator.blobs.directory import DirectoryBlobs
from stratagem.coordinator.blobs.durable import DurableFile
from stratagem.coordinator.blobs.store import Adopt, BlobWriter
from stratagem.coordinator.blobs.temporary import Scratch

_log = structlog.get_logger(__name__)


class BlobCache:
    """The copies under one folder, which is made if absent; for any thread."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self._copies = DirectoryBlobs(root, is_durable=False)
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        by_use = sorted(self._copies.stored(), key=lambda each: each.used_ns)
        self._sizes = OrderedDict((each.digest, each.num_bytes) for each in by_use)
        self._evict()

    def writer(self, total_bytes: int, adopt: Adopt) -> BlobWriter:
        """A writer whose file lies where a copy can be made of it without copying."""
        return self._copies.writer(total_bytes, adopt)

    def scratch(self) -> Scratch:
        """A file for bytes that will become part of a blob."""
        return self._copies.scratch()

    def open(self, digest: Digest) -> BinaryIO | None:
        """The verified copy; None when there is none."""
        try:
            file = self._copies.open(digest)
        except NotFoundError:
            return None
        except IntegrityError as error:
            _log.warning("the local copy of a blob is forgotten", reason=str(error))
            self.drop(digest)
            return None
        with self._lock:
            if digest in self._sizes:
                self._sizes.move_to_end(digest)
        self._copies.touch(digest)
        return file

    def adopt(self, digest: Digest, file: DurableFile, temporary: Path) -> None:
        """Make a copy of a complete file that `writer` has written, whose digest is right."""
        self._copies.adopt(digest, file, temporary)
        with self._lock:
            self._sizes[digest] = file.num_bytes
            self._sizes.move_to_end(digest)
        self._evict()

    def drop(self, digest: Digest) -> None:
        """Forget the copy, if there is one."""
        with self._lock:
            self._sizes.pop(digest, None)
        self._copies.drop(digest)

    def _evict(self) -> None:
        while True:
            with self._lock:
                if len(self._sizes) < 2 or sum(self._sizes.values()) <= self._limit_bytes:
                    return
                oldest, _ = self._sizes.popitem(last=False)
            self._copies.drop(oldest)
