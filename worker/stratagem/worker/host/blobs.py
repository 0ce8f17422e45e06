"""Keep the blobs that the coordinator has uploaded: committed states and inline data, named by
digest.

The store keeps, for each run, all data, the newest states, and those that plans wait for or load,
in memory or, above a limit, in a file. A later call may continue an incomplete upload; a blob is
visible once it is complete. The newest two states are kept, or two for each federation of the run
whose clients train here, as far as memory allows: the state of a federation comes as soon as its
previous round has ended, and its clients wait for those of the others. Used on the event loop.
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
"""Index of the number of resident pages in /proc/self/statm."""


def memory_bytes(device: torch.device) -> int:
    """Return the number of bytes of tensors on a GPU; on the CPU the process's resident memory, or
    its peak if the system does not report the present value."""
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
# trains meanwhile), and would only detect failing memory; workers with the same state detect more
# of that, as they compare their results. Only a blob that has come in several streams is hashed, as
# these may have been those of different callers.

NUM_STATES: Final = 2
"""Number of states kept per run, or per federation of a run."""
MAX_FEDERATIONS: Final = 8
"""The number of federations of a run for which states are kept."""
MAX_UPLOADS: Final = 16
MAX_DROPPED: Final = 1000
"""Number of digests of dropped states that are remembered per run."""
RETRY_AFTER_S: Final = 1.0

Tensors = Mapping[str, Tensor]


class Blob(Protocol):
    """A blob being received, and after `finish` its content. The tensors returned by `load` must
    not be changed."""

    purpose: Purpose
    memory_bytes: int

    def sink(self, offset: int, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> str: ...
    def finish(self) -> None: ...
    def load(self) -> tuple[Tensors, Mapping[str, str]]: ...
    def drop(self) -> None: ...


@contextmanager
def _room_needed() -> Iterator[None]:
    """Context manager that turns errors of a full or missing disk, or of memory, into
    UnavailableError, after which the caller retries. The message has no path, since the coordinator
    sees it."""
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
        except (MemoryError, RuntimeError) as error:  # torch's type for lack of memory
            # Where the machine has enough memory, the end of other runs will free it.
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
        """Do nothing: the tensors are freed with their last reference."""


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
        with suppress(OSError):  # data that a full disk has not taken are not needed any more
            self._file.close()
        self._path.unlink(missing_ok=True)


class BlobUpload:
    """A blob in transfer; another stream may continue the upload if the first one breaks."""

    def __init__(self, digest: str, manifest: Manifest, blob: Blob) -> None:
        self.digest = digest
        self.manifest = manifest
        self.is_open = False
        self.is_broken = False
        """True if a received part could not be stored, so that the upload cannot be continued."""
        self.term = 0
        """The term of the coordinator whose stream fills the upload at present."""
        self.num_streams = 0
        self._blob = blob
        self.writer = ChunkWriter(manifest.total_bytes, self._sink, purpose=manifest.purpose)

    def fill(self, pieces: Iterable[memoryview]) -> None:
        """Store all bytes, which must be checked already. Run it in a thread."""
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
        """Read the file that the coordinator offers, if possible and if nothing was received yet;
        bytes missing after limit_s come over the stream instead. Run it in a thread."""
        if self.writer.received:
            return
        with suppress(IntegrityError, UnreadableFileError):
            if (handle := opened(file, self.digest)) is not None:
                with closing(contents(handle, file, self.manifest.total_bytes)) as pieces:
                    for piece in until(pieces, limit_s):
                        self.writer.take(piece)

    def check(self) -> None:
        """Raise IntegrityError unless the bytes match the digest. Run it in a thread."""
        try:
            digest = self._blob.digest()
        except (OSError, ValueError) as error:
            raise ConflictError("the run was closed meanwhile") from error
        if digest != self.digest:
            raise IntegrityError(f"the bytes of several streams have the digest {digest}")

    def finish(self) -> Blob:
        """Return the blob. Raises IntegrityError while bytes are missing."""
        self.writer.finish()
        with self._or_broken():
            self._blob.finish()
        return self._blob

    def drop(self) -> None:
        self._blob.drop()


@dataclass(slots=True)
class _RunBlobs:
    """The blobs of one run, and which of them are still needed."""

    held: OrderedDict[str, Blob] = field(default_factory=OrderedDict)
    """The blobs, the least recently used first."""
    wanted: dict[object, str] = field(default_factory=dict)
    """Digests that plans wait for or load, keyed by plan."""
    federations: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Federations whose clients have trained here, latest last."""
    dropped: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Digests of dropped states, at most the newest MAX_DROPPED."""

    def note_federation(self, federation: str) -> None:
        """Note that a client of this federation trains on this worker."""
        self.federations[federation] = None
        self.federations.move_to_end(federation)
        if len(self.federations) > MAX_FEDERATIONS:
            self.federations.popitem(last=False)

    def drop_old_states(self, has_room: Callable[[], bool]) -> None:
        """Drop the least recently used states that exceed the number to keep, or NUM_STATES while
        has_room is false; never those that plans want."""
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
        """Begin without blobs. data_dir: folder for blobs in files, which other workers may share;
        files of a killed worker of this name are removed. None to keep all blobs in memory."""
        self.data_dir = data_dir
        self._prefix = f"received-{worker_id}+"  # no worker id has a plus
        self._folder: OwnFolder | None = None
        """The folder for files; made for the first blob that needs it."""
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
        """Return whether this state was here and was dropped for newer ones."""
        run = self._runs.get(run_id)
        return run is not None and digest in run.dropped

    def want(self, run_id: str, digest: str, who: object) -> None:
        """Keep a blob from its arrival until `release`, since parties of a run that take turns here
        would otherwise drop each other's states."""
        self._runs.setdefault(run_id, _RunBlobs()).wanted[who] = digest

    def note_federation(self, run_id: str, federation: str) -> None:
        """Note that a client of this federation is about to read a state of the run."""
        self._runs.setdefault(run_id, _RunBlobs()).note_federation(federation)

    def release(self, run_id: str, who: object) -> None:
        """Undo `want`: the blob may be dropped again to make room."""
        run = self._runs.get(run_id)
        if run is None or run.wanted.pop(who, None) is None:  # the run was dropped meanwhile
            return
        self._drop_old_states(run)
        if not run.held and not run.wanted and not run.dropped:
            del self._runs[run_id]

    async def get(self, run_id: str, digest: str) -> Blob:
        """Wait for a blob and return it."""
        while (blob := self.find(run_id, digest)) is None:
            await self._changed.wait()
        return blob

    def open_upload(self, run_id: str, digest: str, manifest: Manifest, term: int) -> BlobUpload:
        """Open the upload of a blob, new or interrupted. The caller resets `is_open`.

        An upload opened by a coordinator of an earlier leadership term is dropped, since that
        coordinator may be frozen.
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
        """Drop an upload unless another has replaced it; the next stream sends all bytes again."""
        if self._uploads.get((run_id, upload.digest)) is upload:
            self._uploads.pop((run_id, upload.digest)).drop()

    def _forget_oldest(self) -> None:
        """Drop the oldest idle uploads above the limit, since abandoned ones would accumulate."""
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
        """Turn a complete upload into a blob. Raises StaleError if the upload was dropped."""
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
            with suppress(OSError):  # there is none, or a file in it cannot be deleted
                (self._folder.path / run_id).rmdir()

    def clear(self) -> None:
        for run_id in {*self._runs, *(run_id for run_id, _ in self._uploads)}:
            self.drop_run(run_id)
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    @property
    def memory_bytes(self) -> int:
        """Number of bytes of blobs in memory, and of unfinished uploads."""
        used = sum(blob.memory_bytes for run in self._runs.values() for blob in run.held.values())
        return used + sum(upload.manifest.total_bytes for upload in self._uploads.values())

    def _begin(self, run_id: str, digest: str, manifest: Manifest) -> Blob:
        has_room = self.memory_bytes + manifest.total_bytes <= self._max_memory_bytes
        if self.data_dir is None or has_room:
            return _InMemory(manifest)
        if self._folder is not None and not self._folder.path.exists():  # somebody has removed it
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
