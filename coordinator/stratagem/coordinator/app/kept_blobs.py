"""Keeps the blobs that jobs name, in the background: who submits a job asks until it is done.

In an object store what an earlier term has written is copied first. That may take longer than a
client waits for an answer, so no call ends it: a call is answered before that, and the next one
joins. What the store refuses is still the answer to who submits, since the call that learns it is
one of theirs.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from stratagem.common.base.errors import InProgressError
from stratagem.common.base.ids import Digest
from stratagem.coordinator.store.blobs.blob_store import BlobStore

ANSWER_AFTER_S: Final = 5.0
"""Less than a client waits that can ask another coordinator instead."""
FORGET_AFTER_S: Final = 10.0
"""How long the end of a copying waits for the call that asks for it: clients ask every 2 s."""
STAYS_S: Final = 300.0
"""How long after its begin what is kept may be named: it may be collected after twice that."""


@dataclass(frozen=True, slots=True, eq=False)
class _Keeping:
    """A blob that is being kept, for one call that will name it."""

    task: asyncio.Task[bool]
    began_s: float


class KeptBlobs:
    """The blobs that are being kept; used on the event loop."""

    def __init__(self, blobs: BlobStore, *, answer_after_s: float = ANSWER_AFTER_S) -> None:
        self._blobs, self.answer_after_s = blobs, answer_after_s
        self._under_way: dict[Digest, _Keeping] = {}

    async def keep(self, digest: Digest) -> bool:
        """Return True when the blob is here, and stays for the fact that will name it. Raises
        InProgressError while it is being copied; the same call learns what has become of it."""
        clock = asyncio.get_running_loop()
        until_s = clock.time() + self.answer_after_s
        while True:
            keeping = self._under_way.get(digest) or self._begin(digest)
            await asyncio.wait([keeping.task], timeout=until_s - clock.time())
            if not keeping.task.done():
                raise InProgressError(
                    f"{digest} is being made to stay in the store, which copies what an earlier "
                    "term has written; that goes on by itself, and the same call learns how it ends"
                )
            is_taken = self._under_way.get(digest) is not keeping
            self._forget(digest, keeping)
            if not keeping.task.result():
                return False
            if not is_taken and clock.time() - keeping.began_s < STAYS_S:
                return True
            # It was kept for another call, or is collected soon: keep it for this one.

    async def close(self) -> None:
        """Wait for nothing any more."""
        tasks = [keeping.task for keeping in self._under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, digest: Digest) -> _Keeping:
        clock = asyncio.get_running_loop()
        thread = asyncio.to_thread(self._blobs.keep, digest)
        task = asyncio.create_task(thread, name=f"keep {digest}")
        keeping = self._under_way[digest] = _Keeping(task, clock.time())
        # How it ends waits for the call that asks for it, for a while.
        task.add_done_callback(
            lambda _: clock.call_later(FORGET_AFTER_S, self._forget, digest, keeping)
        )
        return keeping

    def _forget(self, digest: Digest, keeping: _Keeping) -> None:
        if self._under_way.get(digest) is keeping:
            del self._under_way[digest]
