"""Channels to our services.

Owns that each call carries the protocol version, and that chunks are read without copies. This is
done by a channel around gRPC's own, and not by its interceptors: those put a queue and two tasks
between a caller and every message of a stream. Deadlines and retries are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

import grpc
import grpc.aio
from google.protobuf.message import Message

from stratagem.common.errors import ConflictError
from stratagem.common.rpc.options import CLIENT_OPTIONS, PROTOCOL_KEY, PROTOCOL_VERSION
from stratagem.common.tensors.frames import reading_frames

_PROTOCOL: Final = ((PROTOCOL_KEY, PROTOCOL_VERSION),)


def open_channel(address: str, *, own_connection: bool = False) -> grpc.aio.Channel:
    """A channel to `host:port`; it connects at the first call.

    own_connection: share no TCP connection with other channels of this process to the same
    address, so that small calls (heartbeats) do not queue behind tensors.
    """
    options = [*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", int(own_connection))]
    return _ProtocolChannel(grpc.aio.insecure_channel(address, options=options))


async def write_message(call: Any, message: Message | bytes) -> None:
    """Write to a connected stream, without losing the reason when the other side refuses.

    `call.write` replaces the status that was sent by INTERNAL when it arrives during a write, which
    is when it does arrive in a stream of tensors. So this goes one step below it, where a message
    may be serialized already. Raises the status as AioRpcError.
    """
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    try:
        await call._cython_call.send_serialized_message(raw)
    except grpc.aio.InternalError:
        await call.code()  # comes right behind
        await call.read()  # raises it, unless it is OK
        raise ConflictError("the other side ended the stream early") from None


class _ProtocolChannel(grpc.aio.Channel):
    """A channel whose calls carry the protocol version beside the caller's own metadata."""

    def __init__(self, inner: grpc.aio.Channel) -> None:
        self._inner = inner

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _with_protocol(self._inner.unary_unary(method, *args, **kwargs))

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **kwargs: Any,
    ) -> Any:
        read = response_deserializer and reading_frames(response_deserializer)
        inner = self._inner.unary_stream(method, request_serializer, read, **kwargs)
        return _with_protocol(inner)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _with_protocol(self._inner.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _with_protocol(self._inner.stream_stream(method, *args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


def _with_protocol(multicallable: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, metadata: Any = (), **kwargs: Any) -> Any:
        return multicallable(*args, metadata=(*(metadata or ()), *_PROTOCOL), **kwargs)

    return call
