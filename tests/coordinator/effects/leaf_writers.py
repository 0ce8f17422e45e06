"""Members that write leaves in some way, and a coordinator before them, without processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc

from stratagem.common.base.ids import Incarnation, WorkerId
from stratagem.common.files.state_folder import StateFolder
from stratagem.common.tensors.manifest import DEFAULT_LIMITS
from stratagem.coordinator.core.facts import Capability, Member
from stratagem.coordinator.effects.execution.effect_context import EffectContext
from stratagem.coordinator.store.blobs.directory_blobs import DirectoryBlobs
from stratagem.coordinator.store.leaves.leaf_blobs import LeafBlobs
from stratagem.coordinator.store.leaves.state_places import in_folder
from stratagem.v1 import types_pb2, worker_pb2

Messages = AsyncIterator[worker_pb2.WriteLeavesResponse]


async def lied(
    folder: StateFolder, request: worker_pb2.WriteLeavesRequest, messages: Messages
) -> Messages:
    """The messages of who has other bytes on the disk than it says."""
    async for message in messages:
        if message.WhichOneof("message") == "leaf":
            digest = message.leaf.digest.hex()
            path = folder.leaves / digest[:2] / f"{digest}-{request.upload}"
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        yield message


class LeavesCall:
    """A call that is answered with these messages."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    async def read(self) -> Any:
        return await anext(self._messages, grpc.aio.EOF)

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def cancel(self) -> None:
        pass


class LeafWriters:
    """The members, and what the coordinator has for their states. answer: of the member of that
    number; address: of the server of its pieces."""

    def __init__(
        self,
        root: Path,
        num_members: int,
        answer: Callable[[int, worker_pb2.WriteLeavesRequest], Messages],
        address: Callable[[int], str] = lambda _: "",
        **capability: Any,
    ) -> None:
        offered = Capability(**{"writes_states": True, "data_plane": "trusted", **capability})
        names = [WorkerId(f"w{number}") for number in range(num_members)]
        self.members = [Member(worker_id=n, incarnation=Incarnation("one")) for n in names]
        self.folder = StateFolder(root / "states")
        whole = DirectoryBlobs(root / "blobs")
        self.blobs = LeafBlobs(
            whole, in_folder(root / "states"), 1, writes_leaves=True, limits=DEFAULT_LIMITS
        )

        def link(member: Member, _state: object) -> Any:
            number = self.members.index(member)

            def write(request: worker_pb2.WriteLeavesRequest) -> LeavesCall:
                return LeavesCall(answer(number, request))

            return SimpleNamespace(
                stub=SimpleNamespace(WriteLeaves=write),
                fence=lambda m: types_pb2.Fence(membership=m),
                address=address(number),
            )

        async def in_thread(call: Callable[[], Any]) -> Any:
            return call()

        workers = {
            m.worker_id: SimpleNamespace(member=m, is_alive=True, capability=offered)
            for m in self.members
        }
        self.env = cast(
            EffectContext,
            SimpleNamespace(
                blobs=self.blobs,
                links=SimpleNamespace(to=link),
                state=SimpleNamespace(workers=workers, runs={}),
                settings=SimpleNamespace(max_state_bytes=2**30, stream_idle_timeout_s=30.0),
                in_thread=in_thread,
            ),
        )

    def files(self) -> list[Path]:
        return list(self.folder.leaves.glob("??/*"))
