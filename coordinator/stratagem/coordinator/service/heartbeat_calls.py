"""The call over which a worker keeps its lease: from its first message, which names the worker."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import RunId, check_run_id
from stratagem.common.identity.callers import check_caller_again
from stratagem.coordinator.runtime.leadership.heartbeat_streams import HeartbeatStreams, Wire
from stratagem.coordinator.service.relay_calls import first_of, member_of
from stratagem.v1 import coordinator_pb2 as pb


async def take_heartbeats(
    streams: HeartbeatStreams,
    requests: AsyncIterator[pb.HeartbeatStreamRequest],
    context: "grpc.aio.ServicerContext[Any, Any]",
    idle_s: float,
) -> None:
    """Take the beats of one worker until either side ends the call."""
    beats = aiter(requests)
    hello = await first_of(beats, idle_s)
    if hello is None:
        raise InvalidInputError.at("worker_id", "is missing: the call ended without a message")
    member = member_of(hello)
    for_run = check_run_id(hello.for_run) if hello.for_run else RunId("")

    async def receive() -> pb.HeartbeatStreamRequest | None:
        return await anext(beats, None)

    await streams.serve(member, for_run, hello, Wire(receive, context.write, check_caller_again))
