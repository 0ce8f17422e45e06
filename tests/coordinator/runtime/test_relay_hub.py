"""The hub of tunnels without gRPC: bytes, limits and reasons; its order is in the model's test."""

import asyncio
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.common.base.errors import LimitError, UnavailableError, WrongStateError
from stratagem.common.base.ids import Incarnation, WorkerId
from stratagem.common.rpc.streams import FRAME_BYTES
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.runtime import relay
from stratagem.coordinator.runtime.relay import RelayHub
from tests.coordinator.runtime.streams import Stream
from tests.patience import AT_ONCE_S

W = Member(worker_id=WorkerId("w"), incarnation=Incarnation("one"))


dials: list[socket.socket] = []
"""Those of one test."""


@asynccontextmanager
async def hubs(registered: Collection[Member] = (W,), **changes: Any) -> AsyncIterator[RelayHub]:
    hub = RelayHub(lambda member: member in registered, **changes)
    try:
        yield hub
    finally:
        await hub.close()
        while dials:
            dials.pop().close()


async def dialled(hub: RelayHub, member: Member = W) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    dials.append(connection)
    path = hub.target(member).removeprefix("unix:")
    await asyncio.get_running_loop().sock_connect(connection, path)
    return connection


async def read(connection: socket.socket) -> bytes:
    async with asyncio.timeout(AT_ONCE_S):
        return await asyncio.get_running_loop().sock_recv(connection, FRAME_BYTES)


async def test_a_dial_reaches_a_parked_stream_and_bytes_go_both_ways() -> None:
    async with hubs() as hub:
        stream = await Stream(hub, W).parked()
        assert hub.counts() == {"parked": 1, "live": 0}
        path = hub.target(W).removeprefix("unix:")
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
        assert len(path) < 100
        connection = await dialled(hub)
        await asyncio.get_running_loop().sock_sendall(connection, b"hello")
        assert await stream.came.get() == b"hello"
        assert hub.counts() == {"parked": 0, "live": 1}
        await stream.sent.put(b"good day")
        assert await read(connection) == b"good day"
        assert hub.num_bytes == len(b"hello") + len(b"good day")
        connection.close()
        await stream.ended()
        assert hub.counts() == {"parked": 0, "live": 0}


async def test_a_dial_without_a_stream_is_ended_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: 5.0))
    async with hubs(dial_wait_s=0) as hub:
        connection = await dialled(hub)
        assert await read(connection) == b""
        with pytest.raises(UnavailableError, match="keeps no tunnel open"):
            hub.check_open(W)
        stream = await Stream(hub, W).parked()
        hub.check_open(W)
        await stream.sent.put(None)
        await stream.ended()
        assert hub.silence(W) == "worker w keeps no tunnel open (last one 0 s ago)"


async def test_a_stream_whose_call_breaks_ends_its_connection() -> None:
    async with hubs() as hub:
        stream = await Stream(hub, W).parked()
        connection = await dialled(hub)
        await asyncio.get_running_loop().sock_sendall(connection, b"x")
        await stream.came.get()
        assert stream.call is not None
        stream.call.cancel()
        assert await read(connection) == b""
        assert hub.counts() == {"parked": 0, "live": 0}


async def test_a_frame_that_is_too_large_ends_the_connection() -> None:
    async with hubs() as hub:
        stream = await Stream(hub, W).parked()
        connection = await dialled(hub)
        await asyncio.get_running_loop().sock_sendall(connection, b"x")
        await stream.came.get()
        await stream.sent.put(bytes(FRAME_BYTES + 1))
        with pytest.raises(LimitError, match="262145 bytes, the limit is 262144"):
            await stream.ended()
        assert await read(connection) == b""


async def test_a_coordinator_may_take_no_tunnels() -> None:
    async with hubs(is_on=False) as hub:
        with pytest.raises(WrongStateError, match="--relay off"):
            await (await Stream(hub, W).parked()).ended()
