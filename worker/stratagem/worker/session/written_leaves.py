"""Writes leaves of a snapshot into the folder of states, some at once, beside the training."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from stratagem.common.base.errors import InvalidInputError, NotFoundError
from stratagem.common.base.ids import Digest
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.channel import PLAINTEXT, Proof
from stratagem.common.tensors.leaves import StateFolder, leaves_of, pieces_of
from stratagem.common.tensors.manifest import to_proto
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.session.joined_leaves import LeafPieces, check_leaves
from stratagem.worker.session.known_leaves import KnownLeaves, LeafHasher, hashed
from stratagem.worker.session.session_states import Frozen

NUM_FILES_AT_ONCE: Final = 2
"""Leaves that are hashed and written at once: one on its way to the disk, one in the processor."""
_UPLOAD: Final = re.compile(r"[0-9]{10}-[0-9a-f]{16}")
DueLeaf = tuple[int, Callable[[], Awaitable[list[memoryview]]]]
"""The number of a leaf, and what gathers its bytes."""


TakeDigest = Callable[[int, Sequence[memoryview]], bytes]


def check_request(request: pb.WriteLeavesRequest) -> None:
    """Refuse a share that is none, and a name that no file may have."""
    if not _UPLOAD.fullmatch(request.upload):
        text = f"{request.upload[:80]!r} is not TERM-TOKEN, 10 digits and 16 of 0-9, a-f"
        raise InvalidInputError.at("upload", text)
    if request.leaves or request.describe:
        check_leaves(request)
    elif request.rank >= request.num_ranks:
        text = f"{request.rank} is not below num_ranks, {request.num_ranks}"
        raise InvalidInputError.at("rank", text)


def check_folder(folder: StateFolder | None, store_id: str) -> StateFolder:
    """Return the folder of states. Raises NotFoundError where this worker does not see the one
    that is meant."""
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
    """Write the leaves that a request asks for; yield the manifest, then each when it is durable.

    proof: shown to members that have pieces of them. hasher: of leaves of the whole state. When
    this ends, however it ends, nothing reads the state any more.
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
            for task in waiting:  # what is in a thread goes on, and is waited for
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


def hasher_of(
    known: KnownLeaves, state: Frozen, request: pb.WriteLeavesRequest
) -> LeafHasher | None:
    """Return what hashes the leaves of a request; None where it is about none of the state alone:
    what several parts make is no snapshot here."""
    return None if request.leaves or request.describe else known.hasher(state)


def digest_by(hasher: LeafHasher | None) -> TakeDigest:
    """Return what takes the digest of a leaf, by its number and its pieces."""
    return hasher.digest if hasher is not None else lambda _, pieces: hashed(pieces)


def due_leaves(pieces: LeafPieces, state: Frozen, request: pb.WriteLeavesRequest) -> deque[DueLeaf]:
    """Return the leaves that a request asks for."""
    return _joined(pieces, request) if request.leaves else _share(state, request)


def _share(state: Frozen, request: pb.WriteLeavesRequest) -> deque[DueLeaf]:
    """Return the leaves of a state that is here as a whole."""
    leaves = leaves_of(state.manifest)
    numbers = range(request.rank, len(leaves), request.num_ranks)

    async def gather(number: int) -> list[memoryview]:
        return list(pieces_of(leaves[number], state.manifest, state.buffers))

    return deque((number, partial(gather, number)) for number in numbers)


def _joined(pieces: LeafPieces, request: pb.WriteLeavesRequest) -> deque[DueLeaf]:
    """Return the leaves of a state of which a part is here."""
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
        """Gather the bytes of a leaf and write it. Once it has begun to write it ends that, too,
        when it is cancelled: the memory of a snapshot must not be used again before."""
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
