"""Leaves of a state of which this worker holds a part: pieces that are here, and those of others.

A request says of which pieces each leaf is made, and who has them. What others have is asked of
them, member to member, into memory of the leaf's own; a snapshot is meant by its name, so bytes of
another one are refused. Lives on the event loop.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final, Self

import numpy as np

from stratagem.common.base.errors import (
    ConflictError,
    InvalidInputError,
    StratagemError,
    UnavailableError,
)
from stratagem.common.process.failpoints import failpoint
from stratagem.common.rpc.channel import Proof, open_channel
from stratagem.common.rpc.tensor_transfer import Retry, pull
from stratagem.common.tensors.leaves import LEAF_BYTES, ByteReader, pieces_manifest
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1.worker_pb2_grpc import WorkerServiceStub
from stratagem.worker.session.sent_state import SentState
from stratagem.worker.session.session_states import Frozen

_RETRY: Final = Retry(max_attempts=2)
"""Who does not answer may be gone: the coordinator finds another way sooner than a long wait."""


def check_leaves(request: pb.WriteLeavesRequest) -> None:
    """Refuse leaves that are larger than any, and pieces of nobody."""
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
    """Return what is sent where some ranges of a snapshot are asked for."""
    buffers = state.named(pieces.name).buffers
    views = ByteReader(buffers).all_views((each.offset, each.size) for each in pieces.ranges)
    return SentState(pieces_manifest(sum(map(len, views))), views)


class LeafPieces:
    """Gathers the pieces of leaves; a context in which connections to other members are open."""

    def __init__(self, state: Frozen, request: pb.WriteLeavesRequest, proof: Proof) -> None:
        self._state, self._request, self._proof = state, request, proof
        self._open = AsyncExitStack()
        self._stubs: dict[str, WorkerServiceStub] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def gather(self, leaf: pb.JoinedLeaf) -> list[memoryview]:
        """Return the bytes of a leaf, in order. Raises UnavailableError where they cannot be had
        from who has them."""
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
        """Return the bytes of each of the pieces that one holder has."""
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
        # Not a bytearray, which would write zeros into all of it first, on the event loop.
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
