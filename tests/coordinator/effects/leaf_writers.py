"""Members that write leaves in some way, and a coordinator before them, without processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc

from stratagem.common.base.errors import UnavailableError
from stratagem.common.base.ids import Incarnation, RunId, WorkerId
from stratagem.common.tensors.leaves import StateFolder
from stratagem.common.tensors.manifest import DEFAULT_LIMITS, Limits
from stratagem.coordinator.core.facts import ROOT, Capability, Member
from stratagem.coordinator.effects.context import EffectContext
from stratagem.coordinator.runtime.links import WorkerSession
from stratagem.coordinator.store.blobs import DirectoryBlobs
from stratagem.coordinator.store.leaves import LeafBlobs, in_folder
from stratagem.v1 import types_pb2, worker_pb2
from stratagem.worker.session.leaves import written_leaves
from stratagem.worker.session.states import Frozen

Messages = AsyncIterator[worker_pb2.WriteLeavesResponse]


Answer = Callable[[StateFolder, Frozen, worker_pb2.WriteLeavesRequest], Messages]
"""How a member that holds a state answers."""


def honest(folder: StateFolder, state: Frozen, request: worker_pb2.WriteLeavesRequest) -> Messages:
    return written_leaves(folder, state, request)


async def dying(
    folder: StateFolder, state: Frozen, request: worker_pb2.WriteLeavesRequest
) -> Messages:
    """After the first leaf; what it is writing then is there before its call ends."""
    num = 0
    async with aclosing(written_leaves(folder, state, request)) as messages:
        async for message in messages:
            yield message
            num += not request.describe
            if num == 2:
                raise UnavailableError("gone")


async def lying(
    folder: StateFolder, state: Frozen, request: worker_pb2.WriteLeavesRequest
) -> Messages:
    """Has other bytes on the disk than it says."""
    async for message in written_leaves(folder, state, request):
        if message.WhichOneof("message") == "leaf":
            path = leaf_file(folder, request, message)
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        yield message


async def meddling(
    folder: StateFolder, state: Frozen, request: worker_pb2.WriteLeavesRequest
) -> Messages:
    """Says what it was not asked."""
    async for message in written_leaves(folder, state, request):
        if message.WhichOneof("message") == "leaf":
            message.leaf.number += 1
        yield message


def leaf_file(
    folder: StateFolder,
    request: worker_pb2.WriteLeavesRequest,
    message: worker_pb2.WriteLeavesResponse,
) -> Path:
    digest = message.leaf.digest.hex()
    return folder.leaves / digest[:2] / f"{digest}-{request.upload}"


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
    """The members, what they hold and how they answer, and what the coordinator has for their
    states. address: of the server of a member's pieces."""

    def __init__(
        self,
        root: Path,
        held: Sequence[Frozen],
        answers: Sequence[Answer],
        address: Callable[[int], str] = lambda _: "",
        **capability: Any,
    ) -> None:
        self.asked: list[str] = []
        offered = Capability(**{"writes_states": True, "data_plane": "trusted", **capability})
        names = [WorkerId(f"w{number}") for number in range(len(held))]
        self.members = [Member(worker_id=n, incarnation=Incarnation("one")) for n in names]
        self.folder = StateFolder(root / "states")
        whole = DirectoryBlobs(root / "blobs")
        self.blobs = LeafBlobs(
            whole, in_folder(root / "states"), 1, writes_leaves=True, limits=DEFAULT_LIMITS
        )

        def link(member: Member) -> Any:
            number = self.members.index(member)

            def write(request: worker_pb2.WriteLeavesRequest) -> LeavesCall:
                self.note(member, request)
                return LeavesCall(answers[number](self.folder, held[number], request))

            return SimpleNamespace(
                stub=SimpleNamespace(WriteLeaves=write),
                fence=lambda m: types_pb2.Fence(membership=m),
                address=address(number),
            )

        workers = {
            m.worker_id: SimpleNamespace(member=m, is_alive=True, capability=offered)
            for m in self.members
        }
        self.env = cast(
            EffectContext,
            SimpleNamespace(
                runs=SimpleNamespace(state=SimpleNamespace(workers=workers, runs={})),
                workers=SimpleNamespace(link=link),
                transfers=SimpleNamespace(
                    blobs=self.blobs,
                    limits=Limits(max_total_bytes=2**30),
                    settings=SimpleNamespace(stream_idle_timeout_s=30.0),
                ),
            ),
        )

    def note(self, member: Member, request: worker_pb2.WriteLeavesRequest) -> None:
        """Note what a member was asked."""
        self.asked.append(member.worker_id)

    def sessions(self) -> list[WorkerSession]:
        return [WorkerSession(member, RunId("r"), ROOT, 1) for member in self.members]

    def files(self) -> list[Path]:
        return list(self.folder.leaves.glob("??/*"))
