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
from stratagem.worker.session.states import Frozen
from tests.worker.session.piece_server import written

Messages = AsyncIterator[worker_pb2.WriteLeavesResponse]


Answer = Callable[[StateFolder, Frozen, worker_pb2.WriteLeavesHeader], Messages]
"""How a member that holds a state answers."""


def honest(folder: StateFolder, state: Frozen, header: worker_pb2.WriteLeavesHeader) -> Messages:
    return written(folder, state, header)


async def dying(
    folder: StateFolder, state: Frozen, header: worker_pb2.WriteLeavesHeader
) -> Messages:
    """After the first leaf; what it is writing then is there before its call ends."""
    num = 0
    async with aclosing(written(folder, state, header)) as messages:
        async for message in messages:
            yield message
            num += not header.describe
            if num == 2:
                raise UnavailableError("gone")


async def lying(
    folder: StateFolder, state: Frozen, header: worker_pb2.WriteLeavesHeader
) -> Messages:
    """Has other bytes on the disk than it says."""
    async for message in written(folder, state, header):
        if message.WhichOneof("message") == "leaf":
            path = leaf_file(folder, header, message)
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        yield message


async def meddling(
    folder: StateFolder, state: Frozen, header: worker_pb2.WriteLeavesHeader
) -> Messages:
    """Says what it was not asked."""
    async for message in written(folder, state, header):
        if message.WhichOneof("message") == "leaf":
            message.leaf.number += 1
        yield message


def leaf_file(
    folder: StateFolder,
    header: worker_pb2.WriteLeavesHeader,
    message: worker_pb2.WriteLeavesResponse,
) -> Path:
    digest = message.leaf.digest.hex()
    return folder.leaves / digest[:2] / f"{digest}-{header.upload}"


class LeavesCall:
    """A call whose header is answered with messages."""

    def __init__(self, answer: Callable[[worker_pb2.WriteLeavesHeader], Messages]) -> None:
        self._answer = answer
        self._cython_call = self

    async def wait_for_connection(self) -> None:
        pass

    async def send_serialized_message(self, raw: bytes) -> None:
        self._messages = self._answer(worker_pb2.WriteLeavesRequest.FromString(raw).header)

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

            def answer(header: worker_pb2.WriteLeavesHeader) -> Messages:
                self.note(member, header)
                return answers[number](self.folder, held[number], header)

            return SimpleNamespace(
                stub=SimpleNamespace(WriteLeaves=lambda: LeavesCall(answer)),
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

    def note(self, member: Member, header: worker_pb2.WriteLeavesHeader) -> None:
        """Note what a member was asked."""
        self.asked.append(member.worker_id)

    def sessions(self) -> list[WorkerSession]:
        return [WorkerSession(member, RunId("r"), ROOT, 1) for member in self.members]

    def files(self) -> list[Path]:
        return list(self.folder.leaves.glob("??/*"))
