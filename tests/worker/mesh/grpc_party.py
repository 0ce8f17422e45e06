"""Members with gRPC links between them, each with a server of its own in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from stratagem.common.rpc.server import bind, make_server
from stratagem.v1 import peer_pb2_grpc
from stratagem.worker.mesh.grpc import GrpcLink, form_grpc
from stratagem.worker.mesh.peers import Group, PeerHub, PeerServicer
from tests.patience import PATIENCE_S
from tests.worker.mesh.engines import meeting

GROUP = Group("run-1", "silo0", term=1, membership=5, rank=0, size=2)


@asynccontextmanager
async def hub_on_server(**options: Any) -> AsyncIterator[PeerHub]:
    server = make_server()
    port = bind(server, "127.0.0.1", 0)
    hub = PeerHub(f"127.0.0.1:{port}", **options)
    peer_pb2_grpc.add_PeerServiceServicer_to_server(PeerServicer(hub), server)
    await server.start()
    try:
        yield hub
    finally:
        await hub.stop()
        await server.stop(None)


@asynccontextmanager
async def grpc_party(
    size: int = 2, group: Group = GROUP, **options: Any
) -> AsyncIterator[list[GrpcLink]]:
    """Links between `size` servers."""
    hubs = [hub_on_server(**options) for _ in range(size)]
    opened = [await hub.__aenter__() for hub in hubs]
    try:
        yield await formed(opened, group)
    finally:
        for hub in hubs:
            await hub.__aexit__(None, None, None)


async def formed(hubs: list[PeerHub], group: Group) -> list[GrpcLink]:
    size = len(hubs)
    of = meeting(size)
    members = [replace(group, rank=rank, size=size) for rank in range(size)]
    return await asyncio.gather(
        *(
            asyncio.to_thread(form_grpc, hub, member, of(member.rank), PATIENCE_S)
            for hub, member in zip(hubs, members, strict=True)
        )
    )
