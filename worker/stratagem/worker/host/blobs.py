"""Keep the blobs that the coordinator has uploaded: committed states and inline data, named by
digest.

The store keeps of each run all data, the newest states, and those that plans wait for or load, in
memory or, above a limit, in a file. A later call may continue an incomplete upload; a blob is
visible once all its bytes are here. The newest two states are kept, or two for each federation of
the run whose clients train here, as far as memory allows it: the state of a federation comes as
soon as the round before has ended, and its clients have their turn after those of the others. Lives
on the event loop and knows nothing of sessions.
"""

import asyncio
import os
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import torch
from torch import Tensor

from stratagem.common.base.errors import (
    ConflictError,
    IntegrityError,
    LimitError,
    StaleError,
    UnavailableError,
)
from stratagem.common.process.process import OwnFolder, remove_abandoned
from stratagem.common.tensors.files import from_file, header_bytes
from stratagem.common.tensors.leaves import state_digest
from stratagem.common.tensors.local_files import UnreadableFileError, contents, opened, until
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.stream import ChunkWriter
from stratagem.common.tensors.torch_codec import allocate, bytes_of, load_file
from stratagem.v1 import tensor_pb2

# ---- Memory use ----

_STATM: Final = Path("/proc/self/statm")
_RSS: Final = 1
"""Which of its numbers counts resident pages."""


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of tensors on a GPU; elsewhere what of this process is in memory, where the
    system does not tell, the most it ever was."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(_STATM.read_text().split()[_RSS]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


# ---- Blobs ----
#
# The digest is a name here and is not computed again: the coordinator has checked the file against
# it, and the checksum of every chunk, made from the bytes as they are read there, protects the
# transfer. SHA-256 of a state costs more than receiving it (0.5 to 1.8 GB/s of one core, which
# trains meanwhile). It would find only failing memory besides; workers that hold the same state
# find more of that, as they compare what they have computed. Only a blob that has come in several
# streams is hashed again: they may have been those of different callers.

NUM_STATES: Final = 2
"""Kept of a run, or of each of its federations."""
MAX_FEDERATIONS: Final = 8
"""Of a run for which states are kept."""
MAX_UPLOADS: Final = 16
MAX_DROPPED: Final = 1000
"""Digests of dropped states that are remembered of each run."""
RETRY_AFTER_S: Final = 1.0

Tensors = Mapping[str, Tensor]


class Blob(Protocol):
    """One blob: its storage from the first byte on, and after `finish` its content.

    `load` gives tensors that the caller must not change.
    """

    purpose: Purpose
    memory_bytes: int

    def sink(self, offset: int, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> str: ...
    def finish(self) -> None: ...
    def load(self) -> tuple[Tensors, Mapping[str, str]]: ...
    def drop(self) -> None: ...


@contextmanager
def _room_needed() -> Iterator[None]:
    """Turn the errors of a disk that is full or away, and of memory, into UnavailableError, which
    is waited for. The message has no path: it goes to the coordinator."""
    try:
        yield
    except (OSError, MemoryError) as error:
        number = error.errno if isinstance(error, OSError) else None
        why = "no memory is left" if number is None else os.strerror(number)
        raise UnavailableError(f"this worker cannot store what it is sent now: {why}") from error


class _InMemory:
    def __init__(self, manifest: Manifest) -> None:
        self.purpose, self.memory_bytes = manifest.purpose, manifest.total_bytes
        self._manifest = manifest
        self._tensors: Tensors = {}
        try:
            self.sink, self._views = allocate(manifest)
        except (MemoryError, RuntimeError) as error:  # torch has no type of its own for it
            # Where there is as much, it is freed as other runs end.
            there_is = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            raise LimitError(
                f"{manifest.total_bytes} bytes are more than this worker's memory; give it a "
                "data_dir for what exceeds max_blob_memory_bytes",
                retry_after_s=RETRY_AFTER_S if manifest.total_bytes <= there_is else None,
            ) from error

    def digest(self) -> str:
        tensors = self._views()
        stored = [bytes_of(tensors[spec.name]) for spec in self._manifest.stored()]
        return state_digest(self._manifest, stored)

    def finish(self) -> None:
        self._tensors = self._views()

    def load(self) -> tuple[Tensors, Mapping[str, str]]:
        return self._tensors, self._manifest.metadata

    def drop(self) -> None:
        """Do nothing: the tensors are freed with the last reference to them."""


class _OnDisk:
    memory_bytes = 0

    def __init__(self, path: Path, manifest: Manifest) -> None:
        path.parent.mkdir(exist_ok=True)
        self.purpose = manifest.purpose
        self._manifest = manifest
        self._path = path
        self._file: BinaryIO = path.open("wb")
        self._file.write(header_bytes(manifest))

    def sink(self, _offset: int, data: bytes | memoryview) -> None:
        if self._file.closed:
            raise StaleError(f"the upload to {self._path.name} was dropped")
        self._file.write(data)

    def digest(self) -> str:
        self._file.flush()
        start = len(header_bytes(self._manifest))
        content = from_file(self._path, start, self._manifest.total_bytes)
        return state_digest(self._manifest, content(0))

    def finish(self) -> None:
        self._file.close()

    def load(self) -> tuple[Tensors, Mapping[str, str]]:
        tensors, manifest = load_file(self._path)
        return tensors, manifest.metadata

    def drop(self) -> None:
        with suppress(OSError):  # what a full disk has not taken is not needed any more
            self._file.close()
        self._path.unlink(missing_ok=True)


class BlobUpload:
    """One blob on its way in. Survives the stream that carried its first part."""

    def __init__(self, digest: str, manifest: Manifest, blob: Blob) -> None:
        self.digest = digest
        self.manifest = manifest
        self.is_open = False
        self.is_broken = False
        """Not all that was taken is stored, so that no later stream can continue it."""
        self.term = 0
        """Term of the coordinator whose stream has it open."""
        self.num_streams = 0
        self._blob = blob
        self.writer = ChunkWriter(manifest.total_bytes, self._sink, purpose=manifest.purpose)

    def fill(self, pieces: Iterable[memoryview]) -> None:
        """Take all bytes, which have been checked; takes its time, so in a thread."""
        for piece in pieces:
            self._sink(self.writer.received, piece)
            self.writer.received += len(piece)

    def _sink(self, offset: int, data: bytes | memoryview) -> None:
        with self._or_broken():
            self._blob.sink(offset, data)

    @contextmanager
    def _or_broken(self) -> Iterator[None]:
        try:
            with _room_needed():
                yield
        except UnavailableError:
            self.is_broken = True
            raise

    def read(self, file: tensor_pb2.OpenFile, limit_s: float) -> None:
        """Take what is offered, where that can be read and nothing is here yet: what is missing
        after limit_s comes as chunks. Takes its time, so in a thread."""
        if self.writer.received:
            return
        with suppress(IntegrityError, UnreadableFileError):
            if (found := opened(file, self.digest)) is not None:
                with closing(contents(found, file, self.manifest.total_bytes)) as pieces:
                    for piece in until(pieces, limit_s):
                        self.writer.take(piece)

    def check(self) -> None:
        """Raise IntegrityError unless the bytes have the digest; takes its time, so in a thread."""
        try:
            digest = self._blob.digest()
        except (OSError, ValueError) as error:
            raise ConflictError("the run was closed meanwhile") from error
        if digest != self.digest:
            raise IntegrityError(f"the bytes of several streams have the digest {digest}")

    def finish(self) -> Blob:
        """Return the blob. Raise IntegrityError while bytes are missing."""
        self.writer.finish()
        with self._or_broken():
            self._blob.finish()
        return self._blob

    def drop(self) -> None:
        self._blob.drop()


@dataclass(slots=True)
class _RunBlobs:
    """The blobs of one run."""

    held: OrderedDict[str, Blob] = field(default_factory=OrderedDict)
    """The least recently used first."""
    wanted: dict[object, str] = field(default_factory=dict)
    """Digests that plans wait for or load, by who does."""
    federations: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Those whose clients have trained here last."""
    dropped: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Digests of states that were here; the newest MAX_DROPPED."""

    def note_federation(self, federation: str) -> None:
        """Note that a client of it trains."""
        self.federations[federation] = None
        self.federations.move_to_end(federation)
        if len(self.federations) > MAX_FEDERATIONS:
            self.federations.popitem(last=False)

    def drop_old_states(self, has_room: Callable[[], bool]) -> None:
        """Drop the least recently used states above the number that is kept, or above NUM_STATES
        while there is no room, but for those that plans want."""
        states = [digest for digest, blob in self.held.items() if blob.purpose is not Purpose.DATA]
        num_kept = NUM_STATES * max(len(self.federations), 1)
        wanted = set(self.wanted.values())
        for place, digest in enumerate(states[:-NUM_STATES]):
            if digest in wanted or (len(states) - place <= num_kept and has_room()):
                continue
            self.held.pop(digest).drop()
            self.dropped[digest] = None
            self.dropped.move_to_end(digest)
            while len(self.dropped) > MAX_DROPPED:
                self.dropped.popitem(last=False)


class ReceivedBlobs:
    """The blobs of all runs of this worker."""

    def __init__(
        self,
        data_dir: Path | None,
        max_memory_bytes: int,
        *,
        worker_id: str = "",
        max_uploads: int = MAX_UPLOADS,
    ) -> None:
        """data_dir: of files of blobs, which a killed worker of this name may have left; workers on
        other machines may use it, too. None: all are held in memory."""
        self.data_dir = data_dir
        self._prefix = f"received-{worker_id}+"  # no name has the plus: none begins with another
        self._folder: OwnFolder | None = None
        """Made for the first blob that needs it."""
        if data_dir is not None:
            remove_abandoned(data_dir, self._prefix)
        self._max_memory_bytes = max_memory_bytes
        self._max_uploads = max_uploads
        self._runs: dict[str, _RunBlobs] = {}
        self._uploads: dict[tuple[str, str], BlobUpload] = {}
        self._changed = asyncio.Event()

    def find(self, run_id: str, digest: str) -> Blob | None:
        run = self._runs.get(run_id)
        if run is None or digest not in run.held:
            return None
        run.held.move_to_end(digest)
        return run.held[digest]

    def was_dropped(self, run_id: str, digest: str) -> bool:
        """Return True for a state that was here and had to give way to newer ones."""
        run = self._runs.get(run_id)
        return run is not None and digest in run.dropped

    def want(self, run_id: str, digest: str, who: object) -> None:
        """Keep a blob from when it is here until `release`, whatever else comes: parties of a run
        that train on this worker by turns would drop each other's states before they are read."""
        self._runs.setdefault(run_id, _RunBlobs()).wanted[who] = digest

    def note_federation(self, run_id: str, federation: str) -> None:
        """Note whose client reads a state of the run now, before it does."""
        self._runs.setdefault(run_id, _RunBlobs()).note_federation(federation)

    def release(self, run_id: str, who: object) -> None:
        """Take a `want` back."""
        run = self._runs.get(run_id)
        if run is None or run.wanted.pop(who, None) is None:  # the run was dropped meanwhile
            return
        self._drop_old_states(run)
        if not run.held and not run.wanted and not run.dropped:
            del self._runs[run_id]

    async def get(self, run_id: str, digest: str) -> Blob:
        """Wait until the blob has arrived, and return it."""
        while (blob := self.find(run_id, digest)) is None:
            await self._changed.wait()
        return blob

    def open_upload(self, run_id: str, digest: str, manifest: Manifest, term: int) -> BlobUpload:
        """Open the upload of this blob, new or where it broke off; the caller ends `is_open`.

        One that a coordinator of an earlier term has open is dropped: that one may be frozen.
        """
        upload = self._uploads.get((run_id, digest))
        if upload is not None and upload.is_open and upload.term >= term:
            raise ConflictError(f"another stream uploads blob {digest}")
        self._check_uploads()
        is_lost = upload is not None and (upload.is_open or upload.is_broken)
        if upload is None or is_lost or upload.manifest != manifest:
            self._forget_oldest()
            if upload is not None:
                upload.drop()
            with _room_needed():
                blob = self._begin(run_id, digest, manifest)
            upload = BlobUpload(digest, manifest, blob)
            self._uploads[run_id, digest] = upload
        upload.is_open, upload.term = True, term
        upload.num_streams += 1
        return upload

    def forget(self, run_id: str, upload: BlobUpload) -> None:
        """Drop an upload, so that the next stream begins from the start, unless it was replaced."""
        if self._uploads.get((run_id, upload.digest)) is upload:
            self._uploads.pop((run_id, upload.digest)).drop()

    def _forget_oldest(self) -> None:
        """Drop the oldest idle uploads above the limit: abandoned ones may not pile up."""
        idle = [key for key, upload in self._uploads.items() if not upload.is_open]
        for run_id, digest in idle[: max(0, len(self._uploads) - self._max_uploads + 1)]:
            self._uploads.pop((run_id, digest)).drop()

    def _check_uploads(self) -> None:
        num_open = sum(upload.is_open for upload in self._uploads.values())
        if num_open >= self._max_uploads:
            raise LimitError(
                f"max_uploads: {num_open} uploads are open, the limit is {self._max_uploads}",
                retry_after_s=RETRY_AFTER_S,
            )

    def commit(self, run_id: str, upload: BlobUpload) -> None:
        """Make a complete upload a blob. Raises StaleError when another has taken its place."""
        if self._uploads.get((run_id, upload.digest)) is not upload:
            raise StaleError(f"the upload of blob {upload.digest} was dropped")
        blob = upload.finish()
        self._uploads.pop((run_id, upload.digest), None)
        self._keep(run_id, upload.digest, blob)

    def drop_run(self, run_id: str) -> None:
        for blob in self._runs.pop(run_id, _RunBlobs()).held.values():
            blob.drop()
        for key in [key for key in self._uploads if key[0] == run_id]:
            self._uploads.pop(key).drop()
        if self._folder is not None:
            with suppress(OSError):  # it has none, or a file of it cannot be deleted
                (self._folder.path / run_id).rmdir()

    def clear(self) -> None:
        for run_id in {*self._runs, *(run_id for run_id, _ in self._uploads)}:
            self.drop_run(run_id)
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of the blobs that are held in memory, and of all uploads that are under way."""
        used = sum(blob.memory_bytes for run in self._runs.values() for blob in run.held.values())
        return used + sum(upload.manifest.total_bytes for upload in self._uploads.values())

    def _begin(self, run_id: str, digest: str, manifest: Manifest) -> Blob:
        has_room = self.memory_bytes + manifest.total_bytes <= self._max_memory_bytes
        if self.data_dir is None or has_room:
            return _InMemory(manifest)
        if self._folder is not None and not self._folder.path.exists():  # somebody has tidied up
            self._folder.remove()
            self._folder = None
        if self._folder is None:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            self._folder = OwnFolder(self.data_dir, self._prefix)
        return _OnDisk(self._folder.path / run_id / digest, manifest)

    def _keep(self, run_id: str, digest: str, blob: Blob) -> None:
        run = self._runs.setdefault(run_id, _RunBlobs())
        run.held[digest] = blob
        run.dropped.pop(digest, None)
        self._drop_old_states(run)
        self._changed.set()
        self._changed = asyncio.Event()

    def _drop_old_states(self, run: _RunBlobs) -> None:
        run.drop_old_states(lambda: self.memory_bytes <= self._max_memory_bytes)
