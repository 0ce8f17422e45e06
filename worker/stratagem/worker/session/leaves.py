"""Write leaves (fixed-size parts of a state that are hashed separately) to the store.

A call may name the pieces of a leaf and the member that holds each one. Pieces of other members are
received into new memory. The call names a snapshot; bytes of another one are refused. Runs on the
event loop.
"""

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Final, NamedTuple, Protocol, Self, TypeVar

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
"""Retries of a fetch from a member: few, as a silent one may be gone, and the coordinator then
finds another way."""


def check_leaves(header: pb.WriteLeavesHeader) -> None:
    """Raise InvalidInputError for leaves that are too large, or pieces without a holder."""
    for leaf in header.leaves:
        size = sum(piece.size for piece in leaf.pieces)
        if size > LEAF_BYTES:
            text = f"leaf {leaf.number} has {size} bytes; allowed are up to {LEAF_BYTES}"
            raise InvalidInputError.at("leaves", text)
        for piece in leaf.pieces:
            if piece.holder >= len(header.holders):
                text = f"piece of holder {piece.holder}; there are {len(header.holders)}"
                raise InvalidInputError.at("leaves", text)


def sent_pieces(state: Frozen, pieces: pb.SnapshotPieces) -> SentState:
    """Return some byte ranges of a snapshot, ready to be sent."""
    buffers = state.named(pieces.name).buffers
    views = ByteReader(buffers).all_views((span.offset, span.size) for span in pieces.ranges)
    return SentState(pieces_manifest(sum(map(len, views))), views)


class LeafPieces:
    """Gathers leaves from pieces; an async context manager that closes connections to members."""

    def __init__(self, state: Frozen, header: pb.WriteLeavesHeader, proof: Proof) -> None:
        self._state, self._header, self._proof = state, header, proof
        self._open = AsyncExitStack()
        self._stubs: dict[str, WorkerServiceStub] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def gather(self, leaf: pb.JoinedLeaf) -> list[memoryview]:
        """Return the bytes of a leaf, in order. Raises UnavailableError without a holder."""
        by_holder: dict[int, list[pb.LeafPiece]] = {}
        for piece in leaf.pieces:
            by_holder.setdefault(piece.holder, []).append(piece)
        views = {n: await self._views(n, pieces) for n, pieces in by_holder.items()}
        failpoint("worker.leaf.joined")
        iterators = {number: iter(parts) for number, parts in views.items()}
        return [view for piece in leaf.pieces for view in next(iterators[piece.holder])]

    async def _views(
        self, number: int, pieces: Sequence[pb.LeafPiece]
    ) -> Sequence[Sequence[memoryview]]:
        """Return the bytes of each of these pieces, which one member holds."""
        holder = self._header.holders[number]
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

        ranges = [pb.ByteRange(offset=piece.offset, size=piece.size) for piece in pieces]
        request = pb.GetStateRequest(
            fence=self._header.fence,
            session=self._header.session,
            snapshot=self._header.snapshot,
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


# ---- Written leaves ----
#
# A leaf is hashed first, as its name contains its digest, and then a sink writes it. Several
# leaves are on their way at once, beside the training. Pieces on this worker are written from the
# memory of the snapshot.

NUM_FILES_AT_ONCE: Final = 2
"""Number of leaves written to a folder at once: one on the disk, one being hashed."""
NUM_OBJECTS_AT_ONCE: Final = 8
"""Number of leaves sent to an object store at once, since one connection alone is slow."""
_NUM_JOINED: Final = 2
"""Number of leaves joined from other members' pieces at once, since they take extra memory."""
_NUM_HASHED: Final = 2
"""Number of leaves hashed at once, since the processor trains meanwhile."""
NUM_ATTEMPTS: Final = 3
_UPLOAD: Final = re.compile(r"[0-9]{10}-[0-9a-f]{16}")

T = TypeVar("T")
Gather = Callable[[], Awaitable[list[memoryview]]]
"""Collects the pieces of a leaf, and returns its bytes."""

log = structlog.get_logger()


def check_header(header: pb.WriteLeavesHeader) -> None:
    """Raise InvalidInputError for a rank beyond num_ranks, or an invalid name of the upload."""
    if not _UPLOAD.fullmatch(header.upload):
        text = f"{header.upload[:80]!r} is not TERM-TOKEN, 10 digits and 16 of 0-9, a-f"
        raise InvalidInputError.at("upload", text)
    if header.leaves or header.describe:
        check_leaves(header)
    elif header.rank >= header.num_ranks:
        text = f"{header.rank} is not below num_ranks, {header.num_ranks}"
        raise InvalidInputError.at("rank", text)


class HashedLeaf(NamedTuple):
    """A leaf with its number, digest and bytes."""

    number: int
    digest: Digest
    pieces: list[memoryview]


class LeafThreads:
    """The threads of one call that hash and write leaves; an async context manager.

    At its end no thread reads the state any more.
    """

    def __init__(self, num: int) -> None:
        self.num, self.is_over = num, False
        self._pool = ThreadPoolExecutor(num, thread_name_prefix="leaves")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_over = True
        await asyncio.shield(asyncio.to_thread(self._pool.shutdown))

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in a thread and return its result; the call completes even if cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


class LeafSink(Protocol):
    """Interface of the places to which one call writes leaves."""

    threads: LeafThreads

    async def write(self, leaf: HashedLeaf) -> None:
        """Write a leaf; return when it is durable."""


class FolderSink:
    """Writes leaves to the folder of states."""

    def __init__(self, folder: StateFolder | None, header: pb.WriteLeavesHeader) -> None:
        """Raises NotFoundError if the header names another folder than this worker's."""
        if folder is None:
            raise NotFoundError("this worker has no --state-folder")
        if folder.store_id() != header.store_id:
            raise NotFoundError(f"{folder.root} is not the coordinator's folder of states")
        self._folder, self._upload = folder, header.upload
        self.threads = LeafThreads(NUM_FILES_AT_ONCE)

    async def write(self, leaf: HashedLeaf) -> None:
        file = leaf.digest, self._upload, leaf.pieces
        write = self._folder.write_leaf
        await self.threads.run(lambda: write(*file, lambda: failpoint("worker.leaf.unnamed")))
        failpoint("worker.leaf.untold")


class ObjectSink:
    """Sends leaves to an object store, each by a signed request that the coordinator makes."""

    def __init__(
        self, stream: SignedStream[pb.WriteLeavesResponse], objects: SignedObjects
    ) -> None:
        self._stream, self._objects = stream, objects
        self.threads = LeafThreads(NUM_OBJECTS_AT_ONCE)

    async def write(self, leaf: HashedLeaf) -> None:
        """Send a leaf; retry with a new signed request, since the earlier one may have expired."""
        backoff = Backoff(0.2, 2.0)
        for num_left in reversed(range(NUM_ATTEMPTS)):
            url = await self._stream.url(leaf.number, bytes.fromhex(leaf.digest))
            try:
                await self.threads.run(partial(self._send, url, leaf.pieces))
                break
            except UnavailableError as error:
                if not num_left:
                    raise
                log.info("a leaf is sent again", leaf=leaf.digest, reason=str(error))
            await backoff.pause()
        failpoint("worker.leaf.stored")

    def _send(self, url: str, pieces: list[memoryview]) -> None:
        self._objects.put(
            url,
            pieces,
            sum(map(len, pieces)),
            on_half=lambda: failpoint("worker.leaf.half_sent"),
            is_cancelled=lambda: self.threads.is_over,
        )


async def write_leaves(
    stream: SignedStream[pb.WriteLeavesResponse],
    sink: LeafSink,
    state: Frozen,
    header: pb.WriteLeavesHeader,
    proof: Proof = PLAINTEXT,
    known: KnownLeaves | None = None,
) -> None:
    """Write the leaves that a header asks for; send the manifest, then a notice of each durable
    leaf.

    proof: shows this worker's identity to members that have pieces. known: digests of the session's
    leaves. When this ends, however it ends, nothing reads the state any more.
    """
    manifest = to_proto(state.manifest)
    stream.say(pb.WriteLeavesResponse(manifest=manifest, name=state.name))
    if header.describe:
        if state.mirror is not None:
            manifest, name = to_proto(state.mirror.manifest), state.mirror.name
            stream.say(pb.WriteLeavesResponse(manifest=manifest, name=name, of_mirror=True))
        return
    # What several parts make is no snapshot here, so nothing is known of its leaves.
    hasher = None if known is None or header.leaves else known.hasher(state)
    writer = _Writer(stream, sink, header, hasher)
    async with LeafPieces(state, header, proof) as pieces, sink.threads:
        due = _due_leaves(pieces, state, header)

        async def write() -> None:
            while due:
                await writer.write(*due.popleft())

        most = _NUM_JOINED if header.leaves else sink.threads.num
        writing = [asyncio.create_task(write()) for _ in range(min(most, len(due)))]
        try:
            await asyncio.gather(*writing)
        finally:
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)


def _due_leaves(
    pieces: LeafPieces, state: Frozen, header: pb.WriteLeavesHeader
) -> deque[tuple[int, Gather]]:
    """Return the leaves that a header asks for: joined from pieces, or a share of the state."""
    if header.leaves:
        return deque((leaf.number, partial(pieces.gather, leaf)) for leaf in header.leaves)
    leaves = leaves_of(state.manifest)

    async def gather(number: int) -> list[memoryview]:
        return list(pieces_of(leaves[number], state.manifest, state.buffers))

    numbers = range(header.rank, len(leaves), header.num_ranks)
    return deque((number, partial(gather, number)) for number in numbers)


class _Writer:
    def __init__(
        self,
        stream: SignedStream[pb.WriteLeavesResponse],
        sink: LeafSink,
        header: pb.WriteLeavesHeader,
        hasher: LeafHasher | None,
    ) -> None:
        self._stream, self._sink, self._hasher = stream, sink, hasher
        self._have = {Digest(digest.hex()) for digest in header.have}
        self._hashing = asyncio.Semaphore(_NUM_HASHED)

    async def write(self, number: int, gather: Gather) -> None:
        """Gather the bytes of a leaf, write them unless the store has them, and report the leaf."""
        pieces = await gather()
        async with self._hashing:
            sha256 = await self._sink.threads.run(partial(self._hash, number, pieces))
        digest = Digest(sha256.hex())
        is_new = digest not in self._have
        if is_new:
            await self._sink.write(HashedLeaf(number, digest, pieces))
            self._have.add(digest)  # of equal leaves one is enough
        written = pb.WrittenLeaf(number=number, digest=sha256, written=is_new)
        self._stream.say(pb.WriteLeavesResponse(leaf=written))

    def _hash(self, number: int, pieces: Sequence[memoryview]) -> bytes:
        return hashed(pieces) if self._hasher is None else self._hasher.digest(number, pieces)
