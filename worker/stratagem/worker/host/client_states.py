"""Store the private state of federated clients on this worker, by run, client and round.

A state is a safetensors file, which is on the disk before its digest is reported, and is checked
against that digest when it is read. Unneeded states of a client are deleted when it writes the next
one; the states of a run stay after its end, as they are the site's. The least recently written runs
above MAX_RUNS are deleted.
"""

import hashlib
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from stratagem.common.base.errors import InvalidInputError, NotFoundError
from stratagem.common.base.files import sync_folder, whole_file
from stratagem.common.base.ids import check_run_id
from stratagem.common.process.failpoints import failpoint

MAX_RUNS: Final = 256
_SUFFIX: Final = ".safetensors"


class ClientStateStore:
    """The states of all clients that train on this worker. Used by the torch thread."""

    def __init__(self, folder: Path, worker_id: str) -> None:
        """Take the folder. folder: where the states are stored, beyond the life of the process."""
        self._folder, self._worker_id = folder, worker_id

    def path(self, run_id: str, client: int, round_num: int) -> Path:
        """Return the path of the file with a client's state after a round."""
        folder = self._folder / check_run_id(run_id) / f"client-{client}"
        return folder / f"round-{round_num}{_SUFFIX}"

    def load(self, run_id: str, client: int, round_num: int, digest: str) -> dict[str, Tensor]:
        """Load a state's tensors. Raises NotFoundError if the file is missing or was changed."""
        try:
            data = self.path(run_id, client, round_num).read_bytes()
        except OSError as error:
            why = error.strerror
        else:
            if hashlib.sha256(data).hexdigest() == digest:
                return self._parsed(data, round_num)
            why = "its content is another"
        text = f"worker {self._worker_id} has nothing of round {round_num} as it was kept: {why}"
        raise NotFoundError(text)

    def save(
        self,
        run_id: str,
        client: int,
        round_num: int,
        tensors: Mapping[str, Tensor],
        kept_rounds: Collection[int] = (),
    ) -> str:
        """Write a state, and delete the client's states of rounds not in `kept_rounds`; return its
        digest once it is durable. Raises InvalidInputError if the disk fails."""
        path = self.path(run_id, client, round_num)
        copies = {
            name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()
        }
        # There is only one entry, since the order of several could differ, and equal states must
        # have equal digests.
        data = save(copies, {"kept_by": f"client {client} of run {run_id}, round {round_num}"})
        try:
            self._make_room(path.parent.parent)
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path, mode=0o600) as file:
                file.write(data)
                failpoint("worker.client_state.before_sync")
            os.utime(path.parent.parent)
            for folder in (path.parent, path.parent.parent, self._folder):
                sync_folder(folder)
        except OSError as error:
            text = f"worker {self._worker_id} cannot write what its client keeps: {error.strerror}"
            raise InvalidInputError.at("strategy.options", text) from None
        failpoint("worker.client_state.after_sync")
        needed = {self.path(run_id, client, number) for number in (*kept_rounds, round_num)}
        for other in path.parent.iterdir():
            if other not in needed:
                other.unlink(missing_ok=True)
        return hashlib.sha256(data).hexdigest()

    def _parsed(self, data: bytes, round_num: int) -> dict[str, Tensor]:
        try:
            return load(data)
        except SafetensorError as error:  # it was told so, and by another program
            raise NotFoundError(
                f"what is kept of round {round_num} cannot be read: {error}"
            ) from None

    def _make_room(self, folder: Path) -> None:
        """Delete the least recently written runs above the limit, before a new run begins."""
        if folder.exists() or not self._folder.exists():
            return
        runs = sorted(self._folder.iterdir(), key=lambda run: run.stat().st_mtime_ns)
        for run in runs[: max(0, len(runs) - MAX_RUNS + 1)]:
            shutil.rmtree(run, ignore_errors=True)
