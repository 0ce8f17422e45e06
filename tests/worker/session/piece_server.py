"""A member that gives pieces of its snapshot, on a real server, or writes leaves to a folder of
states."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from stratagem.common.rpc.server import bind, make_server
from stratagem.common.rpc.tensor_transfer import serve_get
from stratagem.common.tensors.leaves import StateFolder
from stratagem.v1 import worker_pb2 as pb
from stratagem.v1 import worker_pb2_grpc
from stratagem.worker.host.states import SignedStream
from stratagem.worker.session.leaves import FolderSink, sent_pieces, write_leaves
from stratagem.worker.session.states import Frozen


def empty_folder(path: Path) -> StateFolder:
    """A folder of states, as the coordinator prepares it."""
    made = StateFolder(path)
    made.temporary.mkdir(parents=True)
    for number in range(256):
        (made.leaves / f"{number:02x}").mkdir()
    (path / "store-id").write_text("ours\n")
    return made


async def written(
    folder: StateFolder, state: Frozen, header: pb.WriteLeavesHeader
) -> AsyncGenerator[pb.WriteLeavesResponse]:
    """Yield what a member says that writes leaves to a folder."""

    async def nothing_more() -> AsyncIterator[pb.WriteLeavesRequest]:
        await asyncio.Event().wait()
        yield pb.WriteLeavesRequest()

    stream = SignedStream(nothing_more(), pb.WriteLeavesResponse, 30.0)
    work = write_leaves(stream, FolderSink(folder, header), state, header)
    async with aclosing(stream.responses(work)) as responses:
        async for response in responses:
            yield response


class PieceServer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, state: Frozen) -> None:
        self.state = state
        self.asked: list[pb.GetStateRequest] = []

    async def GetState(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.append(request)
        sent = sent_pieces(self.state, request.pieces)
        first = partial(pb.GetStateResponse, name=self.state.name)
        async for message in serve_get(first, sent.manifest, sent.buffers, request.offset):
            yield message


@asynccontextmanager
async def serving(state: Frozen) -> AsyncIterator[tuple[str, PieceServer]]:
    """Yield the address of a member that has this snapshot."""
    server, servicer = make_server(), PieceServer(state)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(None)
