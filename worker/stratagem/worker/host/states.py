"""Read states directly from the folder of states, or from an object store.

Every leaf (piece of a state that is stored by itself) is checked against its digest, and the list
of leaves against that of the state. A state that cannot be read here is requested from the
coordinator, like any other blob.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import structlog

from stratagem.common.base.errors import (
    ConflictError,
    IntegrityError,
    InvalidInputError,
    LimitError,
    StratagemError,
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
    MAX_ASKED,
    Leaf,
    LeafList,
    StateFolder,
    leaves_of,
    places_of,
    read_list,
)
from stratagem.common.tensors.manifest import Limits
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host.blobs import BlobUpload, ReceivedBlobs

# ---- Folder of states ----

log = structlog.get_logger()


@dataclass(slots=True)
class DirectStates:
    """Reads states from the coordinator's folder. Used on the event loop."""

    folder: StateFolder
    limits: Limits
    _reads: dict[tuple[str, str], asyncio.Task[bool]] = field(default_factory=dict)

    async def read(self, blobs: ReceivedBlobs, run_id: str, digest: str, term: int) -> bool:
        """Read a state into a run's blobs; return False if the coordinator must send the state
        instead. Concurrent callers for the same state share one reading."""
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
            listed = await asyncio.to_thread(self.folder.read_list, Digest(digest), self.limits)
            if listed is None:
                return False
            upload = _fresh_upload(blobs, run_id, digest, listed, term)
            await asyncio.to_thread(lambda: upload.fill(self.folder.read_state(listed)))
            blobs.commit(run_id, upload)
        except ConflictError:  # it is being received
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


def _fresh_upload(
    blobs: ReceivedBlobs, run_id: str, digest: str, listed: LeafList, term: int
) -> BlobUpload:
    """Open a blob's upload without the bytes that an interrupted stream has stored."""
    upload = blobs.open_upload(run_id, digest, listed.manifest, term)
    if upload.writer.received:
        blobs.forget(run_id, upload)
        upload = blobs.open_upload(run_id, digest, listed.manifest, term)
    return upload


# ---- Signed requests ----
#
# In this call the worker asks for signed requests, and reports their results. Requests that are
# needed at the same moment share a message, and each URL goes to the task that waits for it. Used
# on the event loop.

R = TypeVar("R", pb.WriteLeavesResponse, pb.FetchStateResponse)


class SignedStream(Generic[R]):
    """Both directions of a call in which the worker asks for signed URLs."""

    def __init__(
        self, requests: AsyncIterator[Any], make: Callable[..., R], idle_timeout_s: float
    ) -> None:
        """Make the stream. requests: those after the header. idle_timeout_s: how long to wait for a
        URL."""
        self._requests, self._idle_timeout_s = requests, idle_timeout_s
        self._make: Callable[..., R] = make
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._asked: deque[pb.AskedLeaf] = deque()
        self._said: deque[R] = deque()
        self._changed = asyncio.Event()
        self._is_over = False

    def say(self, response: R) -> None:
        """Queue a response, which `responses` will yield."""
        self._said.append(response)
        self._changed.set()

    async def url(self, number: int, digest: bytes = b"") -> str:
        """Request a signed URL for a leaf and return the URL. Raises UnavailableError."""
        if self._is_over:
            raise UnavailableError("the coordinator signs nothing more")
        self._asked.append(pb.AskedLeaf(number=number, digest=digest))
        self._changed.set()
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await waiting
        except TimeoutError:
            text = f"the coordinator has signed nothing for {self._idle_timeout_s:g} s"
            raise UnavailableError(text) from None
        finally:
            self._waiting.pop(number, None)

    async def responses(self, work: Coroutine[Any, Any, None]) -> AsyncGenerator[R, None]:
        """Yield responses and requests for URLs until `work` is done; raise its error, if any."""
        reading, working = asyncio.create_task(self._read()), asyncio.create_task(work)
        for task in (reading, working):
            task.add_done_callback(lambda _: self._changed.set())
        try:
            is_done = False
            while not is_done:
                await self._changed.wait()
                self._changed.clear()
                if reading.done() and reading.exception() is not None:
                    reading.result()
                is_done = working.done()
                while (response := self._next()) is not None:
                    yield response
            working.result()
        finally:
            reading.cancel()
            working.cancel()
            await asyncio.gather(reading, working, return_exceptions=True)

    def _next(self) -> R | None:
        if self._said:
            return self._said.popleft()
        if not self._asked:
            return None
        asked = pb.AskedLeaves()
        while self._asked and len(asked.leaves) < MAX_ASKED:
            asked.leaves.append(self._asked.popleft())
        return self._make(asked=asked)

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                if request.WhichOneof("message") != "signed":
                    raise InvalidInputError.at("message", "signed requests must follow the header")
                for signed in request.signed.requests:
                    waiting = self._waiting.get(signed.number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(signed.url)
        finally:
            self._is_over = True
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(UnavailableError("the coordinator signs nothing more"))


# ---- States in an object store ----
#
# The coordinator sends the list of a state and signs the requests; the bytes come from the store.

NUM_AHEAD: Final = 4
"""Number of leaves in memory or in transfer at once."""
NUM_ATTEMPTS: Final = 3
_NUM_PIECES: Final = 256
"""The number of small tensors whose bytes are passed on at once."""


async def received_list(
    requests: AsyncIterator[Any],
    header: pb.FetchStateHeader,
    limits: Limits,
    idle_timeout_s: float,
) -> LeafList:
    """Receive a state's list of leaves after the header. Raises IntegrityError for a bad digest."""
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
    """Fetch a state into a run's blobs, and report its arrival."""
    run_id, digest, term = header.run_id, header.digest, header.fence.term
    upload = _fresh_upload(blobs, run_id, digest, listed, term)
    try:
        await _Fetched(stream, objects, listed).fill(upload)
        blobs.commit(run_id, upload)
    except BaseException:
        blobs.forget(run_id, upload)
        raise
    finally:
        upload.is_open = False
    stream.say(pb.FetchStateResponse(committed=True))


class _Fetched:
    """The leaves of one state in transfer and in memory."""

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
