"""States that this worker reads from the folder of states by itself, without the coordinator.

Every leaf is checked against its digest, and the list against that of the state. What cannot be
read here is asked of the coordinator, like any other blob.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from stratagem.common.base.errors import ConflictError, StratagemError
from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import LeafList, StateFolder
from stratagem.common.tensors.manifest import Limits
from stratagem.worker.host.worker_blob_cache import BlobUpload, ReceivedBlobs

log = structlog.get_logger()


@dataclass(slots=True)
class DirectStates:
    """The folder of states as this worker sees it. Lives on the event loop."""

    folder: StateFolder
    limits: Limits
    _reads: dict[tuple[str, str], asyncio.Task[bool]] = field(default_factory=dict)

    async def read(self, blobs: ReceivedBlobs, run_id: str, digest: str, term: int) -> bool:
        """Read a state into the blobs of a run; False where it must come another way. Those who
        want the same one at once share the reading."""
        key = (run_id, digest)
        task = self._reads.get(key)
        if task is None:
            task = asyncio.create_task(self._read(blobs, run_id, digest, term))
            self._reads[key] = task
            task.add_done_callback(lambda _: self._reads.pop(key, None))
        return await asyncio.shield(task)

    async def _read(self, blobs: ReceivedBlobs, run_id: str, digest: str, term: int) -> bool:
        upload = None
        try:
            listed = await asyncio.to_thread(self._listed, digest)
            if listed is None:
                return False
            upload = blobs.open_upload(run_id, digest, listed.manifest, term)
            if upload.writer.received:  # what a stream has left of it
                blobs.forget(run_id, upload)
                upload = blobs.open_upload(run_id, digest, listed.manifest, term)
            await asyncio.to_thread(self._fill(upload, listed))
            blobs.commit(run_id, upload)
        except ConflictError:  # it is coming
            return False
        except (StratagemError, OSError, ValueError) as error:
            log.warning("a state is asked of the coordinator", digest=digest, reason=str(error))
            if upload is not None:
                blobs.forget(run_id, upload)
            return False
        finally:
            if upload is not None:
                upload.is_open = False
        return True

    def _listed(self, digest: str) -> LeafList | None:
        return self.folder.read_list(Digest(digest), self.limits)

    def _fill(self, upload: BlobUpload, listed: LeafList) -> Callable[[], None]:
        return lambda: upload.fill(self.folder.read_state(listed))
