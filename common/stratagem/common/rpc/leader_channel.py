"""A channel to a cluster of several coordinators, of which one leads.

Owns going on to the next address when a call fails because no server answers there, or because that
coordinator only stands by. Repeating the call is the caller's: all of ours are repeated with
pauses, so the next attempt meets the next address. Knows no service.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio

from stratagem.common.base.errors import StandbyError
from stratagem.common.base.host_port import split_address
from stratagem.common.rpc.channel import DelegatingChannel, open_channel
from stratagem.common.rpc.status_codes import name_of


def split_addresses(text: str) -> tuple[str, ...]:
    """ "host1:7070,host2:7070" as its parts. Raises ValueError when there is none, or one of them
    is no address."""
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    if not addresses:
        raise ValueError(f"{text!r} is not HOST:PORT[,HOST:PORT...]")
    for address in addresses:
        split_address(address)
    return addresses


@dataclass(slots=True)
class Coordinators:
    """The addresses of the coordinators of one cluster, and which of them is asked now.

    Several channels of one process may share it: then they move on together.
    """

    addresses: tuple[str, ...]
    present: str = field(init=False)

    def __post_init__(self) -> None:
        self.present = self.addresses[0]

    @property
    def are_several(self) -> bool:
        return len(self.addresses) > 1

    def move_on(self, failed: str) -> None:
        """Ask the next one from now on, unless another call has moved on already."""
        if failed == self.present:
            index = self.addresses.index(failed)
            self.present = self.addresses[(index + 1) % len(self.addresses)]


class CoordinatorChannel(DelegatingChannel):
    """A channel whose calls each go to the coordinator that is asked at that time."""

    def __init__(
        self,
        coordinators: Coordinators,
        open_one: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self._coordinators = coordinators
        self._open_one = open_one
        self._channels: Final[dict[str, grpc.aio.Channel]] = {}
        self._looks: Final[set[asyncio.Task[None]]] = set()
        self._present()  # raises now what is wrong with the caller's files

    async def close(self, grace: float | None = None) -> None:
        for channel in self._channels.values():
            await channel.close(grace)

    def _present(self) -> grpc.aio.Channel:
        return self._channel(self._coordinators.present)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._open_one(address)
        return self._channels[address]

    def _calls(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made: dict[str, Callable[..., Any]] = {}

        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            address = self._coordinators.present
            if address not in made:
                made[address] = getattr(self._channel(address), kind)(*args, **kwargs)
            started = made[address](*call_args, **call_kwargs)
            if self._coordinators.are_several:
                started.add_done_callback(lambda ended: self._ended(address, ended))
            return started

        return call

    def _ended(self, address: str, call: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._look(address, call))
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    async def _look(self, address: str, call: Any) -> None:
        if await call.code() is not grpc.StatusCode.UNAVAILABLE:
            return
        details, trailing = await call.details(), await call.trailing_metadata()
        initial = await call.initial_metadata()
        error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, initial, trailing, details)
        # A leader that refuses for reasons of its own (a full disk) is still the one to ask.
        if name_of(error) in ("", StandbyError.__name__):
            self._coordinators.move_on(address)
