"""Sends the answers of one call, and gives up a caller that takes none of them for a while.

gRPC waits without end for a caller that has stopped reading: the call, its file and its buffers
would never end. The deadline is on progress: a slow caller may take its time, and so may a
handler that has nothing to say. There is one timer for all answers of a call.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

from stratagem.common.base.errors import UnavailableError

_LOOKS: int = 4
"""In the time that a caller may take nothing; so it may take a quarter longer."""


class Sending:
    """An asynchronous context manager; raises UnavailableError where the caller has stopped."""

    __slots__ = ("_context", "_loop", "_since_s", "_stall_s", "_timeout", "_timer")

    def __init__(self, context: Any, stall_s: float | None) -> None:
        """stall_s: None waits without end."""
        self._context, self._stall_s = context, stall_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._look_later()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._timeout.__aexit__(exc_type, exc_val, exc_tb)
        except TimeoutError:
            text = f"the caller has taken nothing for {self._stall_s:g} s; ask again from there on"
            raise UnavailableError(text) from None

    async def send(self, response: Any) -> None:
        """Returns once gRPC has room for more."""
        self._since_s = self._loop.time()
        await self._context.write(response)
        self._since_s = None

    def _look_later(self) -> None:
        if self._stall_s is not None:
            self._timer = self._loop.call_later(self._stall_s / _LOOKS, self._look)

    def _look(self) -> None:
        assert self._stall_s is not None
        now_s = self._loop.time()
        if self._since_s is not None and now_s - self._since_s >= self._stall_s:
            self._timeout.reschedule(now_s)
        else:
            self._look_later()
