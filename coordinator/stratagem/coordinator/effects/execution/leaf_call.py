"""The call by which a member writes its share of the leaves of a state.

Where members see the folder of states, that is all there is to it. Of an object store they have no
keys: they ask inside the call for a signed request for each leaf, whose name has its digest.
"""

from collections.abc import Sequence
from typing import Any

import grpc.aio

from stratagem.common.base.errors import InvalidInputError, UnavailableError
from stratagem.common.base.ids import Digest
from stratagem.common.rpc.channel import write_message
from stratagem.coordinator.effects.execution.leaf_signing import LeafSigning
from stratagem.coordinator.store.leaves.leaf_objects import LeafObjects
from stratagem.v1 import worker_pb2

LeafMessage = worker_pb2.WriteLeavesResponse | worker_pb2.PutLeavesResponse


class LeafCall:
    """One call, its messages and the requests that are signed in it."""

    def __init__(
        self, stub: Any, request: worker_pb2.WriteLeavesRequest, signs: LeafObjects | None
    ) -> None:
        """signs: where leaves are objects."""
        self._request = request
        self._call: Any = stub.WriteLeaves(request) if signs is None else stub.PutLeaves()
        self._signing: LeafSigning | None = None
        if signs is not None:
            self._signing = LeafSigning(
                self._call,
                worker_pb2.PutLeavesRequest,
                lambda leaves: signs.signed_puts(leaves, request.upload),
            )

    async def begin(self) -> None:
        """Send the request, where it is the first message of a stream."""
        if self._signing is not None:
            await self._call.wait_for_connection()
            await write_message(self._call, worker_pb2.PutLeavesRequest(header=self._request))

    async def read(self) -> Any:
        """Return the next message; None at a good end. Raises AioRpcError, or UnavailableError for
        an end that is not good."""
        message = await self._call.read()
        if message is not grpc.aio.EOF:
            return message
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise UnavailableError(f"{code.name}: {await self._call.details()}")
        return None

    async def sign(self, asked: Sequence[worker_pb2.AskedLeaf]) -> None:
        """Send a signed request for each leaf that is asked for, which the caller has checked.
        Raises LimitError for too many, and InvalidInputError where there is a folder."""
        if self._signing is None:
            raise InvalidInputError.at("message", "asks for signed requests, and there is a folder")
        leaves = [Digest(leaf.digest.hex()) for leaf in asked]
        await self._signing.answer([leaf.number for leaf in asked], leaves)

    def cancel(self) -> None:
        """End the call; does nothing to one that has ended."""
        self._call.cancel()
