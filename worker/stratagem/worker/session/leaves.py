"""Join and write the leaves of a state of which this worker has a part.

A request names the pieces of each leaf, and the members that have them. Other members send their
pieces into memory of the leaf. The request names a snapshot, and bytes of another one are refused.
Used on the event loop.
"""

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Final, Self, TypeVar

import numpy as np
import structlog

from stratagem.common.base.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    StratagemError,
    UnavailableError,
)
from stratagem.common.base.ids import Digest
from stratagem.common.base.retry import Backoff
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.channel import PLAINTEXT, Proof, open_channel
from stratagem.common.rpc.signed_objects import SignedObjects
from stratagem.common.rpc.tensor_transfer import Retry, pull
from stratagem.common.tensors.leaves import (
    LEAF_BYTES,
    ByteReader,
    StateFolder,
    leaves_of,
    pieces_manifest,
    pieces_of,
)
from stratagem.common.tensors.manifest import Manifest, Purpose, to_proto
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.worker_pb2_grpc import WorkerServiceStub
from stratagem.worker.host.states import SignedStream
from stratagem.worker.session.states import Frozen, KnownLeaves, LeafHasher, SentState, hashed

# ---- Leaves joined from pieces ----

_RETRY: Final = Retry(max_attempts=2)
"""A member that does not answer may be gone: the coordinator finds another way sooner than a long
wait would."""


def check_leaves(request: pb.WriteLeavesRequest) -> None:
    """Refuse leaves that are too large, and pieces without a holder."""
    for leaf in request.leaves:
        size = sum(piece.size for piece in leaf.pieces)
        if size > LEAF_BYTES:
            text = f"leaf {leaf.number} has {size} bytes; allowed are up to {LEAF_BYTES}"
            raise InvalidInputError.at("leaves", text)
        for piece in leaf.pieces:
            if piece.holder >= len(request.holders):
                text = f"piece of holder {piece.holder}; there are {len(request.holders)}"
                raise InvalidInputError.at("leaves", text)


def sent_pieces(state: Frozen, pieces: pb.SnapshotPieces) -> SentState:
    """Return the requested ranges of a snapshot, to be sent."""
    buffers = state.named(pieces.name).buffers
    views = ByteReader(buffers).all_views((each.offset, each.size) for each in pieces.ranges)
    return SentState(pieces_manifest(sum(map(len, views))), views)


class LeafPieces:
    """The pieces of leaves; a context in which connections to other members are open."""

    def __init__(self, state: Frozen, request: pb.WriteLeavesRequest, proof: Proof) -> None:
        self._state, self._request, self._proof = state, request, proof
        self._open = AsyncExitStack()
        self._stubs: dict[str, WorkerServiceStub] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def gather(self, leaf: pb.JoinedLeaf) -> list[memoryview]:
        """Return the bytes of a leaf, in order. Raises UnavailableError where a holder does not
        send them."""
        by_holder: dict[int, list[pb.LeafPiece]] = {}
        for piece in leaf.pieces:
            by_holder.setdefault(piece.holder, []).append(piece)
        views = {n: await self._views(n, pieces) for n, pieces in by_holder.items()}
        failpoint("worker.leaf.joined")
        given = {number: iter(each) for number, each in views.items()}
        return [view for piece in leaf.pieces for view in next(given[piece.holder])]

    async def _views(
        self, number: int, pieces: Sequence[pb.LeafPiece]
    ) -> Sequence[Sequence[memoryview]]:
        """Return the bytes of each piece of one holder."""
        holder = self._request.holders[number]
        if not holder.address:
            reader = ByteReader(self._state.named(holder.name).buffers)
            return [list(reader.views(piece.offset, piece.size)) for piece in pieces]
        received = await self._pulled(holder, pieces)
        views, at = [], 0
        for piece in pieces:
            views.append([received[at : at + piece.size]])
            at += piece.size
        return views

    async def _pulled(self, holder: pb.PartHolder, pieces: Sequence[pb.LeafPiece]) -> memoryview:
        # A bytearray would first write zeros to all of it, on the event loop.
        received = np.empty(sum(piece.size for piece in pieces), np.uint8).data
        expected = pieces_manifest(len(received))

        def accept(manifest: Manifest) -> memoryview:
            if manifest != expected:
                raise ConflictError(f"{holder.address} sends other bytes than were asked for")
            return received

        ranges = [pb.ByteRange(offset=each.offset, size=each.size) for each in pieces]
        request = pb.GetStateRequest(
            fence=self._request.fence,
            session=self._request.session,
            snapshot=self._request.snapshot,
            pieces=pb.SnapshotPieces(name=holder.name, ranges=ranges),
        )
        stub = await self._stub(holder.address)

        def ask(offset: int) -> object:
            request.offset = offset
            return stub.GetState(request)

        try:
            await pull(ask, accept, purpose=Purpose.STATE, retry=_RETRY)  # type: ignore[arg-type]
        except StratagemError as error:
            raise UnavailableError(f"no pieces from {holder.address}: {error}") from error
        return received

    async def _stub(self, address: str) -> WorkerServiceStub:
        stub = self._stubs.get(address)
        if stub is None:
            channel = open_channel(address, self._proof, to_worker="")
            stub = self._stubs[address] = WorkerServiceStub(channel)
            await self._open.enter_async_context(channel)
        return stub


# ---- Leaves written to the folder of states ----
#
# Several leaves are written at once, beside the training.

NUM_FILES_AT_ONCE: Final = 2
"""The number of leaves that are hashed and written at once: one in transfer to the disk, one in the
processor."""
_UPLOAD: Final = re.compile(r"[0-9]{10}-[0-9a-f]{16}")
DueLeaf = tuple[int, Callable[[], Awaitable[list[memoryview]]]]
"""The number of a leaf, and the function that gathers its bytes."""


TakeDigest = Callable[[int, Sequence[memoryview]], bytes]


def check_request(request: pb.WriteLeavesRequest) -> None:
    """Refuse an invalid share, and a name that no file may have."""
    if not _UPLOAD.fullmatch(request.upload):
        text = f"{request.upload[:80]!r} is not TERM-TOKEN, 10 digits and 16 of 0-9, a-f"
        raise InvalidInputError.at("upload", text)
    if request.leaves or request.describe:
        check_leaves(request)
    elif request.rank >= request.num_ranks:
        text = f"{request.rank} is not below num_ranks, {request.num_ranks}"
        raise InvalidInputError.at("rank", text)


def check_folder(folder: StateFolder | None, store_id: str) -> StateFolder:
    """Return the folder of states. Raises NotFoundError where this is not the requested one."""
    if folder is None:
        raise NotFoundError("this worker has no --state-folder")
    if not store_id or folder.store_id() != store_id:
        raise NotFoundError(f"{folder.root} is not the coordinator's folder of states")
    return folder


async def written_leaves(
    folder: StateFolder,
    state: Frozen,
    request: pb.WriteLeavesRequest,
    proof: Proof = PLAINTEXT,
    hasher: LeafHasher | None = None,
) -> AsyncGenerator[pb.WriteLeavesResponse, None]:
    """Write the requested leaves; yield the manifest, then each leaf when it is durable.

    proof: that for members that have pieces. hasher: that of leaves of the whole state. When this
    ends, in any way, nothing reads the state any more.
    """
    yield pb.WriteLeavesResponse(manifest=to_proto(state.manifest), name=state.name)
    if request.describe:
        if state.mirror is not None:
            told = to_proto(state.mirror.manifest)
            yield pb.WriteLeavesResponse(manifest=told, name=state.mirror.name, of_mirror=True)
        return
    writer = _Writer(folder, request, digest_by(hasher))
    async with LeafPieces(state, request, proof) as pieces:
        due = due_leaves(pieces, state, request)
        waiting: deque[asyncio.Task[pb.WrittenLeaf]] = deque()
        try:
            while due or waiting:
                while due and len(waiting) < NUM_FILES_AT_ONCE:
                    waiting.append(asyncio.create_task(writer.write(*due.popleft())))
                leaf = await asyncio.shield(waiting[0])
                waiting.popleft()
                failpoint("worker.leaf.untold")
                yield pb.WriteLeavesResponse(leaf=leaf)
        finally:
            for task in waiting:  # work in a thread continues, and is awaited
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


def hasher_of(
    known: KnownLeaves, state: Frozen, request: pb.WriteLeavesRequest
) -> LeafHasher | None:
    """Return the hasher of a request's leaves; None where they are not made of one state, since a
    state of several parts is no snapshot here."""
    return None if request.leaves or request.describe else known.hasher(state)


def digest_by(hasher: LeafHasher | None) -> TakeDigest:
    """Return a function from the number and the pieces of a leaf to its digest."""
    return hasher.digest if hasher is not None else lambda _, pieces: hashed(pieces)


def due_leaves(pieces: LeafPieces, state: Frozen, request: pb.WriteLeavesRequest) -> deque[DueLeaf]:
    """Return the requested leaves."""
    return _joined(pieces, request) if request.leaves else _share(state, request)


def _share(state: Frozen, request: pb.WriteLeavesRequest) -> deque[DueLeaf]:
    """Return the requested leaves of a state that is complete here."""
    leaves = leaves_of(state.manifest)
    numbers = range(request.rank, len(leaves), request.num_ranks)

    async def gather(number: int) -> list[memoryview]:
        return list(pieces_of(leaves[number], state.manifest, state.buffers))

    return deque((number, partial(gather, number)) for number in numbers)


def _joined(pieces: LeafPieces, request: pb.WriteLeavesRequest) -> deque[DueLeaf]:
    """Return the requested leaves of a state of which a part is here."""
    return deque((leaf.number, partial(pieces.gather, leaf)) for leaf in request.leaves)


class _Writer:
    def __init__(
        self, folder: StateFolder, request: pb.WriteLeavesRequest, digest: TakeDigest
    ) -> None:
        self._folder, self._upload, self._digest = folder, request.upload, digest
        self._have = {Digest(digest.hex()) for digest in request.have}

    async def write(
        self, number: int, gather: Callable[[], Awaitable[list[memoryview]]]
    ) -> pb.WrittenLeaf:
        """Gather the bytes of a leaf and write it. A write that has begun is completed even when
        this is cancelled, as the memory of a snapshot must not be reused before."""
        pieces = await gather()
        writing = asyncio.ensure_future(asyncio.to_thread(self._write, number, pieces))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait((writing,))
            raise

    def _write(self, number: int, pieces: Sequence[memoryview]) -> pb.WrittenLeaf:
        """Write one leaf, unless the folder has it."""
        sha256 = self._digest(number, pieces)
        digest = Digest(sha256.hex())
        is_new = digest not in self._have
        if is_new:
            self._folder.write_leaf(digest, self._upload, pieces, _written)
            self._have.add(digest)  # of equal leaves one is enough
        return pb.WrittenLeaf(number=number, digest=sha256, written=is_new)


def _written() -> None:
    failpoint("worker.leaf.unnamed")


# ---- Leaves sent to an object store by signed requests ----
#
# The name of a leaf contains its digest. So each leaf is hashed, then its signed request is
# fetched, and then it is sent, several at once. Pieces on this worker are sent from the memory of
# the snapshot.

NUM_OBJECTS_AT_ONCE: Final = 8
"""The number of leaves that are hashed or sent at once, as one connection gets a fraction of an
object store's throughput."""
NUM_JOINED: Final = 2
"""The number of these with pieces of other members, which need extra memory."""
_NUM_HASHED: Final = 2
"""The number of these that are hashed at once, as the processor trains meanwhile."""
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
    """Write the requested leaves; report the manifest, then each leaf when it is stored.

    proof: that for members that have pieces. hasher: that of leaves of the whole state. When this
    ends, in any way, nothing reads the state any more.
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
        """Gather the bytes of a leaf, write it, unless the store has it, and report it."""
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
        """Wait until no thread reads the state any more."""
        self._is_over = True
        await asyncio.shield(asyncio.to_thread(self._threads.shutdown))

    async def _put(self, number: int, pieces: list[memoryview], sha256: bytes) -> None:
        """Send a leaf. After a refusal or a break a new request is fetched, as the old one may have
        expired."""
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
        self._objects.put(
            url, pieces, size, lambda: failpoint("worker.leaf.half_sent"), lambda: self._is_over
        )

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
