"""Keeps the blobs that jobs name, in the background: who submits a job asks until it is done.

In an object store what an earlier term has written is copied first. That may take longer than a
client waits for an answer, so no call ends it: a call is answered before that, and the next one
joins. What the store refuses is still the answer to who submits, since the call that learns it is
one of theirs.
"""

import asyncio
from typing import Final

from stratagem.common.base.errors import InProgressError
from stratagem.common.base.ids import Digest
from stratagem.coordinator.store.blobs.blob_store import BlobStore

ANSWER_AFTER_S: Final = 5.0
"""Less than a client waits that can ask another coordinator instead."""
FORGET_AFTER_S: Final = 60.0
"""How long an error waits for the call that asks for it."""


class KeptBlobs:
    """The blobs that are being kept; used on the event loop."""

    def __init__(self, blobs: BlobStore, *, answer_after_s: float = ANSWER_AFTER_S) -> None:
        self._blobs, self.answer_after_s = blobs, answer_after_s
        self._under_way: dict[Digest, asyncio.Task[bool]] = {}

    async def keep(self, digest: Digest) -> bool:
        """Return True when the blob is here, and stays for the fact that will name it. Raises
        InProgressError while it is being copied; the same call learns what has become of it."""
        clock = asyncio.get_running_loop()
        until_s = clock.time() + self.answer_after_s
        while True:
            joined = self._under_way.get(digest)
            task = joined or self._begin(digest)
            await asyncio.wait([task], timeout=until_s - clock.time())
            if not task.done():
                raise InProgressError(
                    f"{digest} is being copied inside the store, since an earlier term has written "
                    "it; that goes on by itself, and the same call learns how it ends"
                )
            self._forget(digest, task)
            if not task.result():
                return False
            if joined is None:
                return True
            # What was kept for another call may be collected by now: keep it for this one.

    async def close(self) -> None:
        """Wait for nothing any more."""
        tasks = [*self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, digest: Digest) -> asyncio.Task[bool]:
        keeping = asyncio.to_thread(self._blobs.keep, digest)
        task = self._under_way[digest] = asyncio.create_task(keeping, name=f"keep {digest}")
        task.add_done_callback(lambda done: self._ended(digest, done))
        return task

    def _ended(self, digest: Digest, task: asyncio.Task[bool]) -> None:
        """Have an error wait for the call that asks for it, for a while."""
        if task.cancelled() or task.exception() is None:
            self._forget(digest, task)
        else:
            task.get_loop().call_later(FORGET_AFTER_S, self._forget, digest, task)

    def _forget(self, digest: Digest, task: asyncio.Task[bool]) -> None:
        if self._under_way.get(digest) is task:
            del self._under_way[digest]
