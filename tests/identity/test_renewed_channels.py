"""The channels of earlier certificates: each is open for as long as calls run on it, no longer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from stratagem.common.base.errors import UnavailableError
from stratagem.common.identity.certificates import Authority
from stratagem.common.identity.tls import Role
from stratagem.common.rpc import channel as channels
from stratagem.common.rpc.channel import Proof, open_channel
from stratagem.v1 import coordinator_pb2 as pb
from stratagem.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.identity.rig import asked, serving
from tests.patience import PATIENCE_S


class Opened:
    """One of gRPC's own channels."""

    def __init__(self, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.channel, self._close = channel, channel.close
        self._is_closed = asyncio.Event()
        monkeypatch.setattr(channel, "close", self._note_close)

    async def _note_close(self, grace: float | None = None) -> None:
        await self._close(grace)
        self._is_closed.set()

    async def until_closed(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._is_closed.wait()
        assert self.state is grpc.ChannelConnectivity.SHUTDOWN

    @property
    def state(self) -> grpc.ChannelConnectivity:
        return self.channel.get_state()


@dataclass(frozen=True, slots=True)
class Renewing:
    """A channel to a server, and how it is renewed."""

    authority: Authority
    channel: grpc.aio.Channel
    opened: list[Opened]
    """What was opened for it, in this order."""

    async def renew(self) -> None:
        before = len(self.opened)
        self.authority.issue(Role.CLIENT, "alice", renew=True)
        assert await asked(self.channel) == "client alice"
        assert len(self.opened) == before + 1

    async def stream(self) -> Any:
        """Begin a call that runs until it is ended."""
        call = CoordinatorServiceStub(self.channel).UploadData()
        await answered(call)
        return call


async def answered(call: Any) -> None:
    await call.write(pb.UploadDataRequest())
    assert await call.read() == pb.UploadDataResponse()


@asynccontextmanager
async def renewing(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Renewing]:
    opened: list[Opened] = []
    open_one = grpc.aio.secure_channel

    def open_and_note(*args: Any, **kwargs: Any) -> grpc.aio.Channel:
        opened.append(Opened(open_one(*args, **kwargs), monkeypatch))
        return opened[-1].channel

    monkeypatch.setattr(grpc.aio, "secure_channel", open_and_note)
    monkeypatch.setattr(channels, "_LOOK_EVERY_S", 0.0)
    alice = Proof(authority.files("client-alice"))
    async with (
        serving(authority.files("coordinator")) as ports,
        open_channel(ports.certificates, alice, own_connection=True) as channel,
    ):
        yield Renewing(authority, channel, opened)


async def test_a_channel_is_closed_when_its_last_call_has_ended(
    own_authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with renewing(own_authority, monkeypatch) as it:
        stream, cancelled = await it.stream(), await it.stream()
        for _ in range(3):
            await it.renew()
        first, *between, newest = it.opened
        for unused in between:
            await unused.until_closed()
        cancelled.cancel()
        assert await cancelled.code() is grpc.StatusCode.CANCELLED
        await answered(stream)
        assert first.state is newest.state is grpc.ChannelConnectivity.READY
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        assert await asked(it.channel) == "client alice"
        await first.until_closed()
        assert it.opened == [first, *between, newest]


async def test_the_end_of_all_ends_calls_on_earlier_channels_too(
    own_authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with renewing(own_authority, monkeypatch) as it:
        stream = await it.stream()
        await it.renew()
        await it.channel.close()
        assert await stream.code() is grpc.StatusCode.CANCELLED
        for each in it.opened:
            await each.until_closed()
        own_authority.issue(Role.CLIENT, "alice", renew=True)
        with pytest.raises(UnavailableError, match="is closed"):
            await asked(it.channel)
        assert len(it.opened) == 2, "a call that comes too late opens none"
