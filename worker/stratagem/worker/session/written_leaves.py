"""Writes leaves of a snapshot into the folder of states, some at once, beside the training."""

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from stratagem.common.base.errors import InvalidInputError, NotFoundError
from stratagem.common.base.ids import Digest
from stratagem.common.files.state_folder import StateFolder
from stratagem.common.process.failpoints import failpoint
from stratagem.common.tensors.manifest import to_proto
from stratagem.common.tensors.state_leaves import Leaf, leaves_of, pieces_of
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.session.session_states import Frozen

NUM_AT_ONCE: Final = 2
"""Leaves that are hashed and written at once: one on its way to the disk, one in the processor."""
_UPLOAD: Final = re.compile(r"[0-9]{10}-[0-9a-f]{16}")


def check_request(request: pb.WriteLeavesRequest) -> None:
    """Refuse a share that is none, and a name that no file may have."""
    if not _UPLOAD.fullmatch(request.upload):
        text = f"{request.upload[:80]!r} is not TERM-TOKEN, 10 digits and 16 of 0-9, a-f"
        raise InvalidInputError.at("upload", text)
    if request.rank >= request.num_ranks:
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
    folder: StateFolder, state: Frozen, request: pb.WriteLeavesRequest
) -> AsyncGenerator[pb.WriteLeavesResponse, None]:
    """Write the leaves that a request asks for; yield the manifest, then each when it is durable.

    When this ends, however it ends, nothing reads the state any more.
    """
    yield pb.WriteLeavesResponse(manifest=to_proto(state.manifest))
    leaves = leaves_of(state.manifest)
    writer = _Writer(folder, state, request)
    due = deque(range(request.rank, len(leaves), request.num_ranks))
    waiting: deque[asyncio.Task[pb.WrittenLeaf]] = deque()
    try:
        while due or waiting:
            while due and len(waiting) < NUM_AT_ONCE:
                number = due.popleft()
                write = asyncio.to_thread(writer.write, number, leaves[number])
                waiting.append(asyncio.create_task(write))
            leaf = await asyncio.shield(waiting[0])
            waiting.popleft()
            failpoint("worker.leaf.untold")
            yield pb.WriteLeavesResponse(leaf=leaf)
    finally:
        if waiting:  # threads go on; the memory of the snapshot must not be used again before
            await asyncio.gather(*waiting, return_exceptions=True)


class _Writer:
    def __init__(self, folder: StateFolder, state: Frozen, request: pb.WriteLeavesRequest) -> None:
        self._folder, self._state, self._upload = folder, state, request.upload
        self._have = {Digest(digest.hex()) for digest in request.have}

    def write(self, number: int, leaf: Leaf) -> pb.WrittenLeaf:
        """Write one leaf, unless the folder has it."""
        sha256 = hashlib.sha256()
        for piece in self._pieces(leaf):
            sha256.update(piece)
        digest = Digest(sha256.hexdigest())
        is_new = digest not in self._have
        if is_new:
            pieces = self._pieces(leaf)
            self._folder.write_leaf(digest, self._upload, pieces, _written)
            self._have.add(digest)  # of equal leaves one is enough
        return pb.WrittenLeaf(number=number, digest=sha256.digest(), written=is_new)

    def _pieces(self, leaf: Leaf) -> list[memoryview]:
        return list(pieces_of(leaf, self._state.manifest, self._state.buffers))


def _written() -> None:
    failpoint("worker.leaf.unnamed")
