"""States in leaves that this worker reads from an object store by signed requests.

The coordinator sends the list of a state and signs the requests; the bytes come from the store.
Every leaf is checked against its digest, and the list against that of the state.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any, Final

from stratagem.common.base.errors import (
    IntegrityError,
    InvalidInputError,
    LimitError,
    UnavailableError,
)
from stratagem.common.base.ids import Digest
from stratagem.common.base.retry import Backoff
from stratagem.common.rpc.signed_objects import SignedObjects
from stratagem.common.rpc.streams import StallTimeout
from stratagem.common.tensors.files import MAX_HEADER_BYTES
from stratagem.common.tensors.leaves import (
    LEAF_BYTES,
    MAGIC,
    Leaf,
    LeafList,
    leaves_of,
    places_of,
    read_list,
)
from stratagem.common.tensors.manifest import Limits
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host.signed_stream import SignedStream
from stratagem.worker.host.worker_blob_cache import BlobUpload, ReceivedBlobs

NUM_AHEAD: Final = 4
"""Leaves in memory, some of them on their way."""
NUM_ATTEMPTS: Final = 3
_NUM_PIECES: Final = 256
"""Small tensors that are taken in at once."""


async def received_list(
    requests: AsyncIterator[Any],
    header: pb.FetchStateHeader,
    limits: Limits,
    idle_timeout_s: float,
) -> LeafList:
    """Return the list of a state, which follows the header. Raises IntegrityError where it has
    another digest."""
    most = len(MAGIC) + MAX_HEADER_BYTES
    most += 32 * (limits.max_total_bytes // LEAF_BYTES + limits.max_tensors + 1)
    if header.list_bytes > most:
        text = f"header.list_bytes: {header.list_bytes}, the limit is {most}"
        raise LimitError(text)
    content = bytearray()
    async with StallTimeout(idle_timeout_s) as peer:
        while len(content) < header.list_bytes:
            with peer.waiting():
                request = await anext(requests, None)
            if request is None or request.WhichOneof("message") != "list" or not request.list:
                raise InvalidInputError.at("message", "the whole list must follow the header")
            content += request.list
    if hashlib.sha256(content).hexdigest() != header.digest:
        raise IntegrityError(f"the list of {header.digest} has another digest")
    return await asyncio.to_thread(read_list, bytes(content), header.digest, limits)


async def fetch_state(
    stream: SignedStream[pb.FetchStateResponse],
    objects: SignedObjects,
    blobs: ReceivedBlobs,
    header: pb.FetchStateHeader,
    listed: LeafList,
) -> None:
    """Read a state into the blobs of a run, and say when it is there."""
    run_id, digest, term = header.run_id, header.digest, header.fence.term
    upload = blobs.open_upload(run_id, digest, listed.manifest, term)
    try:
        if upload.writer.received:  # what a stream has left of it
            blobs.forget(run_id, upload)
            upload = blobs.open_upload(run_id, digest, listed.manifest, term)
        await _Fetched(stream, objects, listed).fill(upload)
        blobs.commit(run_id, upload)
    except BaseException:
        blobs.forget(run_id, upload)
        raise
    finally:
        upload.is_open = False
    stream.say(pb.FetchStateResponse(committed=True))


class _Fetched:
    """The leaves of one state, on their way and in memory."""

    def __init__(
        self,
        stream: SignedStream[pb.FetchStateResponse],
        objects: SignedObjects,
        listed: LeafList,
    ) -> None:
        self._stream, self._objects, self._listed = stream, objects, listed
        self._leaves = leaves_of(listed.manifest)
        self._held: dict[int, asyncio.Task[memoryview]] = {}

    async def fill(self, upload: BlobUpload) -> None:
        places = places_of(self._leaves)
        due = iter(dict.fromkeys(place.leaf for place in places))
        pieces: list[memoryview] = []
        try:
            for place in places:
                while place.leaf not in self._held or len(self._held) < NUM_AHEAD:
                    number = next(due, None)
                    if number is None:
                        break
                    self._held[number] = asyncio.create_task(self._fetch(number))
                data = await self._held[place.leaf]
                end = place.start + place.size
                pieces.append(data[place.start : end])
                is_last = end == self._leaves[place.leaf].size
                if is_last:
                    del self._held[place.leaf]
                if is_last or len(pieces) == _NUM_PIECES:
                    await asyncio.to_thread(upload.fill, pieces)
                    pieces = []
        finally:
            for task in self._held.values():
                task.cancel()
            await asyncio.gather(*self._held.values(), return_exceptions=True)

    async def _fetch(self, number: int) -> memoryview:
        backoff = Backoff(0.2, 2.0)
        for _ in range(NUM_ATTEMPTS - 1):
            try:
                return await self._attempt(number)
            except UnavailableError:
                await backoff.pause()
        return await self._attempt(number)

    async def _attempt(self, number: int) -> memoryview:
        url = await self._stream.url(number)
        leaf, digest = self._leaves[number], self._listed.digests[number]
        return await asyncio.to_thread(self._read, url, leaf, digest)

    def _read(self, url: str, leaf: Leaf, digest: Digest) -> memoryview:
        data = self._objects.get(url, leaf.size)
        if hashlib.sha256(data).hexdigest() != digest:
            raise IntegrityError(f"leaf {digest} has other bytes than were written")
        return data
