"""Keep this worker's part of the commits of its runs, in files that outlive the process.

Replicas that take local steps have no other copy. At the end of a segment they are written here,
and are on the disk before the segment counts as finished; their digest is in its fact. They are
read when the run continues from that commit, and when they are uploaded. A file is deleted once the
run returns to a later commit, and those of a run at its end. Without a folder they are kept in
memory, and lost with the process.

The torch thread and threads of calls use this module.
"""

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, NotFoundError, SoleCopyLostError
from stratagem.common.base.files import sync_folder, whole_file
from stratagem.common.tensors.files import blob_digest, file_digest, header_bytes
from stratagem.common.tensors.torch_codec import bytes_of, load_file
from stratagem.worker.host.stalls import moved
from stratagem.worker.session.states import Frozen, freeze

MAX_RUNS: Final = 64
"""Number of runs whose files are kept when the worker starts (the newest ones): runs that ended
while it was away are never closed here."""

State = tuple[Mapping[str, Tensor], Mapping[str, str]]
"""Tensors, which do not change, and metadata."""


class KeptReplicas:
    """The files with the only copies of states of all runs of one worker."""

    def __init__(self, folder: Path | None = None) -> None:
        """Take the folder, which no other worker uses and which is made when needed; None to keep
        states in memory."""
        self._folder = folder
        self._in_memory: dict[tuple[str, int], State] = {}
        self._lock = threading.Lock()
        self.unsent: set[str] = set()
        """Runs whose newest segment has a part that exists only on this worker."""
        if folder is not None and folder.is_dir():
            runs = sorted(folder.iterdir(), key=lambda run: run.stat().st_mtime_ns)
            for run in runs[:-MAX_RUNS]:
                shutil.rmtree(run, ignore_errors=True)

    @property
    def is_durable(self) -> bool:
        """True if the files outlive the process."""
        return self._folder is not None

    def write(self, run_id: str, segment: int, state: State) -> str:
        """Write the state that only this worker has at the end of a segment; return its digest."""
        frozen = freeze(*state)
        self.unsent.add(run_id)
        digest = blob_digest(frozen.manifest, frozen.buffers)
        if self._folder is None:
            with self._lock:
                self._in_memory[run_id, segment] = state
            return digest
        path = self._path(run_id, segment)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, mode=0o600) as file:
            file.write(header_bytes(frozen.manifest))
            for buffer in frozen.buffers:
                file.write(buffer)
                moved()
        for folder in (path.parent, self._folder):
            sync_folder(folder)
        return digest

    def load(self, run_id: str, segment: int, digest: str) -> State:
        """Return a written state. Raises SoleCopyLostError if it is missing or has changed."""
        with self._lock:
            state = self._in_memory.get((run_id, segment))
        if state is not None:
            return state
        try:
            path = self._path(run_id, segment)
            if file_digest(path) == digest:
                tensors, manifest = load_file(path)
                return tensors, manifest.metadata
        except (OSError, NotFoundError) as error:
            text = f"what this worker alone had of segment {segment} is not here any more"
            raise SoleCopyLostError(text) from error
        text = f"what this worker alone had of segment {segment} has another digest than it had"
        raise SoleCopyLostError(text)

    def frozen(self, run_id: str, segment: int) -> Frozen:
        """Return a written state, ready to be sent; its digest is not checked. Raises NotFoundError
        if there is none."""
        with self._lock:
            state = self._in_memory.get((run_id, segment))
        if state is not None:
            return freeze(*state)
        try:
            tensors, manifest = load_file(self._path(run_id, segment))
        except (OSError, InvalidInputError) as error:
            text = f"nothing is kept here of segment {segment} of run {run_id!r}"
            raise NotFoundError(text) from error
        return Frozen(manifest, [bytes_of(tensors[spec.name]) for spec in manifest.stored()])

    def drop_before(self, run_id: str, segment: int) -> None:
        """Delete the states of segments before this one; the run cannot return to them."""
        with self._lock:
            for key in [key for key in self._in_memory if key[0] == run_id and key[1] < segment]:
                del self._in_memory[key]
        for path in [] if self._folder is None else (self._folder / run_id).glob("*.safetensors"):
            if path.stem.isdecimal() and int(path.stem) < segment:
                path.unlink(missing_ok=True)

    def drop_run(self, run_id: str) -> None:
        """Delete the states of a run."""
        self.unsent.discard(run_id)
        with self._lock:
            for key in [key for key in self._in_memory if key[0] == run_id]:
                del self._in_memory[key]
        if self._folder is not None:
            shutil.rmtree(self._folder / run_id, ignore_errors=True)

    def _path(self, run_id: str, segment: int) -> Path:
        if self._folder is None:
            raise NotFoundError("this worker has no folder for what must last (--data-dir)")
        return self._folder / run_id / f"{segment}.safetensors"
