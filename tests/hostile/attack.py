"""Says something to a server, and looks at what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from tests.hostile.promises import Method, documented
from tests.patience import AT_ONCE_S

LIMIT_S: Final = 2.0
SLACK_S: Final = AT_ONCE_S
"""On top of the limit, of a machine that has other things to do; what takes longer never ends."""
PROTOCOL: Final = (("stratagem-protocol", "1"),)
NEVER: Final = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})
_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_metadata_size", 2**20),
    ("grpc.absolute_max_metadata_size", 2**20),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True)
class Answer:
    """How a call ended; code None: it has answered something and stays open."""

    code: grpc.StatusCode | None
    reason: str
    seconds: float
    num_responses: int

    def wrong(
        self, method: Method, also: Iterable[grpc.StatusCode] = (), limit_s: float = LIMIT_S
    ) -> str:
        """What is wrong with the answer; "" when nothing is."""
        if self.seconds > limit_s + SLACK_S:
            return f"{method}: answered after {self.seconds:.1f} s"
        if self.code is None:
            return "" if self.num_responses else f"{method}: no answer at all"
        if self.code in NEVER or self.code not in documented(method) | set(also):
            return f"{method}: {self.code.name} is not promised: {self.reason!r}"
        if self.code is grpc.StatusCode.OK:
            return ""
        if not self.reason or "Traceback" in self.reason or len(self.reason) > 2000:
            return f"{method}: {self.code.name} gives no good reason: {self.reason[:300]!r}"
        return ""


def lawless_channel(address: str) -> grpc.aio.Channel:
    """A channel without any limits or rules of ours."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


async def say(
    channel: grpc.aio.Channel,
    method: Method,
    frames: Sequence[bytes],
    *,
    is_last: bool = True,
    metadata: Sequence[tuple[str, str]] = PROTOCOL,
    limit_s: float = LIMIT_S,
    patience_s: float = 0.3,
    **options: Any,
) -> Answer:
    """Send serialized messages, any number of them, and wait for the status.

    is_last: say that nothing more comes. A call that has answered something and goes on is let go
    when nothing has come for patience_s: where it must end, that is as long as any patience.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    call: Any = channel.stream_stream(method.path)(metadata=tuple(metadata), **options)
    num_responses = 0
    try:
        async with asyncio.timeout(limit_s + SLACK_S) as patience:
            await _write(call, frames, is_last)
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while await call.read() is not grpc.aio.EOF:
                    num_responses += 1
                    patience.reschedule(loop.time() + patience_s)
            code, reason = await call.code(), await call.details()
        return Answer(code, reason or "", loop.time() - began, num_responses)
    except TimeoutError:
        return Answer(None, "", loop.time() - began, num_responses)
    finally:
        call.cancel()


async def _write(call: Any, frames: Sequence[bytes], is_last: bool) -> None:
    """One step below `call.write`, which replaces the status of a call that has just ended."""
    with suppress(grpc.aio.InternalError, grpc.aio.AioRpcError):
        await call.wait_for_connection()
        for frame in frames:
            await call._cython_call.send_serialized_message(frame)
        if is_last:
            await call.done_writing()
