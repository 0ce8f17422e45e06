"""The call that carries connections to workers that cannot be dialled, and who registers as one."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeVar

import grpc

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import Incarnation, check_worker_id
from stratagem.common.rpc.streams import PARKED
from stratagem.coordinator.core.facts import Member
from stratagem.coordinator.runtime.relay_hub import RelayHub
from stratagem.coordinator.service.request_limits import check_address
from stratagem.v1 import coordinator_pb2 as pb

T = TypeVar("T")


class _OfWorker(Protocol):
    """A request by which a worker names itself."""

    worker_id: str
    incarnation: str


def member_of(request: _OfWorker) -> Member:
    """Return the start of a worker that a request names. Raises InvalidInputError."""
    incarnation = request.incarnation
    if not 1 <= len(incarnation) <= 64:
        raise InvalidInputError.at(
            "incarnation", f"{incarnation[:80]!r} must have 1 to 64 characters"
        )
    worker_id = check_worker_id(request.worker_id)
    return Member(worker_id=worker_id, incarnation=Incarnation(incarnation))


def check_way(relay: RelayHub, request: pb.RegisterWorkerRequest) -> None:
    """Check how a worker is reached: at an address, or through a tunnel and then at none."""
    if not request.capability.tunnelled:
        check_address(request.address)
        return
    relay.check_on()
    if request.address:
        raise InvalidInputError.at("address", "must be empty: the worker is tunnelled")


async def first_of(frames: AsyncIterator[T], idle_s: float) -> T | None:
    """Return the first message of a standing call; None for none. Raises TimeoutError."""
    try:
        async with asyncio.timeout(idle_s):
            return await anext(frames, None)
    except TimeoutError:
        raise TimeoutError(f"the first frame did not arrive within {idle_s:g} s") from None


async def carry(
    relay: RelayHub,
    requests: AsyncIterator[pb.RelayRequest],
    context: "grpc.aio.ServicerContext[Any, Any]",
    idle_s: float,
) -> None:
    """Carry one connection, from the frame that names its worker to its end."""
    relay.check_on()
    frames = aiter(requests)
    hello = await first_of(frames, idle_s)
    if hello is None or hello.data:
        raise InvalidInputError.at("data", "the first frame names the worker, and has no bytes")
    member = member_of(hello)

    async def receive() -> bytes | None:
        frame = await anext(frames, None)
        return None if frame is None else frame.data

    async def send(data: bytes) -> None:
        await context.write(pb.RelayResponse(data=data))

    async def say_parked() -> None:
        await context.send_initial_metadata(PARKED)

    await relay.carry(member, receive, send, say_parked)
