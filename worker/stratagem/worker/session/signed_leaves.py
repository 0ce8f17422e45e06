"""Writes leaves of a snapshot into an object store by signed requests, beside the training.

The name of a leaf has its digest in it: so each is hashed first, then its request is asked for, and
then it is sent, some at once. What is here is sent from the memory of the snapshot.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

import structlog

from stratagem.common.base.errors import UnavailableError
from stratagem.common.base.ids import Digest
from stratagem.common.base.retry import Backoff
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.channel import PLAINTEXT, Proof
from stratagem.common.rpc.signed_objects import SignedObjects
from stratagem.common.tensors.manifest import to_proto
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host.signed_stream import SignedStream
from stratagem.worker.session.joined_leaves import LeafPieces
from stratagem.worker.session.known_leaves import LeafHasher
from stratagem.worker.session.session_states import Frozen
from stratagem.worker.session.written_leaves import TakeDigest, digest_by, due_leaves

NUM_OBJECTS_AT_ONCE: Final = 8
"""Leaves that are hashed or sent at once: one connection alone gets a fraction of what an object
store can do."""
NUM_JOINED: Final = 2
"""Leaves of which other members have pieces: these are in memory of their own."""
_NUM_HASHED: Final = 2
"""Of these, leaves that are hashed: the processor trains meanwhile."""
NUM_ATTEMPTS: Final = 3

T = TypeVar("T")

log = structlog.get_logger()


async def put_leaves(
    stream: SignedStream[pb.PutLeavesResponse],
    objects: SignedObjects,
    state: Frozen,
    request: pb.WriteLeavesRequest,
    proof: Proof = PLAINTEXT,
    hasher: LeafHasher | None = None,
) -> None:
    """Write the leaves that a request asks for; say the manifest, then each when it is there.

    proof: shown to members that have pieces of them. hasher: of leaves of the whole state. When
    this ends, however it ends, nothing reads the state any more.
    """
    stream.say(pb.PutLeavesResponse(manifest=to_proto(state.manifest), name=state.name))
    if request.describe:
        if state.mirror is not None:
            told = to_proto(state.mirror.manifest)
            mirror = pb.PutLeavesResponse(manifest=told, name=state.mirror.name, of_mirror=True)
            stream.say(mirror)
        return
    have = {Digest(digest.hex()) for digest in request.have}
    share = _Share(stream, objects, have, digest_by(hasher))
    async with LeafPieces(state, request, proof) as pieces:
        due = due_leaves(pieces, state, request)

        async def write() -> None:
            while due:
                await share.write(*due.popleft())

        most = NUM_JOINED if request.leaves else NUM_OBJECTS_AT_ONCE
        writing = [asyncio.create_task(write()) for _ in range(min(most, len(due)))]
        try:
            await asyncio.gather(*writing)
        finally:
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)
            await share.close()


class _Share:
    def __init__(
        self,
        stream: SignedStream[pb.PutLeavesResponse],
        objects: SignedObjects,
        have: set[Digest],
        digest: TakeDigest,
    ) -> None:
        self._stream, self._objects, self._have, self._digest = stream, objects, have, digest
        self._threads = ThreadPoolExecutor(NUM_OBJECTS_AT_ONCE, thread_name_prefix="leaves")
        self._hashing = asyncio.Semaphore(_NUM_HASHED)
        self._is_over = False

    async def write(self, number: int, gather: Callable[[], Awaitable[list[memoryview]]]) -> None:
        """Gather the bytes of a leaf, write it, unless the store has it, and say so."""
        pieces = await gather()
        async with self._hashing:
            sha256 = await self._in_thread(partial(self._digest, number, pieces))
        digest = Digest(sha256.hex())
        is_new = digest not in self._have
        if is_new:
            await self._put(number, pieces, sha256)
            self._have.add(digest)  # of equal leaves one is enough
        failpoint("worker.leaf.stored")
        written = pb.WrittenLeaf(number=number, digest=sha256, written=is_new)
        self._stream.say(pb.PutLeavesResponse(leaf=written))

    async def close(self) -> None:
        """Return when no thread reads the state any more."""
        self._is_over = True
        await asyncio.shield(asyncio.to_thread(self._threads.shutdown))

    async def _put(self, number: int, pieces: list[memoryview], sha256: bytes) -> None:
        """Send a leaf; what was refused or broke off is asked for again: its time may be over."""
        backoff = Backoff(0.2, 2.0)
        for left in reversed(range(NUM_ATTEMPTS)):
            url = await self._stream.url(number, sha256)
            try:
                await self._in_thread(partial(self._send, url, pieces))
                return
            except UnavailableError as error:
                if not left:
                    raise
                log.info("a leaf is sent again", leaf=sha256.hex(), reason=str(error))
            await backoff.pause()

    def _send(self, url: str, pieces: list[memoryview]) -> None:
        size = sum(map(len, pieces))
        self._objects.put(url, pieces, size, _half_sent, lambda: self._is_over)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _half_sent() -> None:
    failpoint("worker.leaf.half_sent")
