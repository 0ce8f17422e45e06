"""Streams of workers, as the hub of tunnels is given them, without gRPC."""

import asyncio
from dataclasses import dataclass, field

from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.runtime.relay import RelayHub
from tests.patience import AT_ONCE_S


@dataclass
class Stream:
    """A worker's end of a stream: what it sends, and what has come."""

    hub: RelayHub
    member: Member
    sent: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    came: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    is_parked: asyncio.Event = field(default_factory=asyncio.Event)
    call: asyncio.Task[None] | None = None

    async def parked(self) -> "Stream":
        async def say() -> None:
            self.is_parked.set()

        carrying = self.hub.carry(self.member, self.sent.get, self.came.put, say)
        self.call = asyncio.create_task(carrying)
        await asyncio.wait(
            (self.call, asyncio.create_task(self.is_parked.wait())),
            return_when=asyncio.FIRST_COMPLETED,
        )
        return self

    @property
    def is_over(self) -> bool:
        return self.call is not None and self.call.done()

    async def ended(self) -> None:
        assert self.call is not None
        async with asyncio.timeout(AT_ONCE_S):
            await self.call
