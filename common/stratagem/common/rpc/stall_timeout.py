"""Ends a block of one stream when its peer lets it wait for too long.

gRPC waits without end for a peer that has stopped reading or writing: the call, its file and its
buffers would never end. The limit is on progress: a peer may take its time over a stream, and only
the waits for it count, not what happens here in between. One timer serves all messages of a stream.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

from stratagem.common.base.errors import UnavailableError

_NUM_LOOKS: Final = 8
"""How often a wait is looked at within the limit, so that it may take an eighth longer."""


def is_silent(stall_s: float) -> Exception:
    """Make the error for a peer that sends nothing."""
    return TimeoutError(f"the peer was silent for {stall_s:g} s")


def takes_nothing(stall_s: float) -> Exception:
    """Make the error for a caller that takes none of its answers."""
    return UnavailableError(
        f"the caller has taken nothing for {stall_s:g} s; ask again from there on"
    )


class StallTimeout:
    """An asynchronous context manager; raises an error once a wait inside has lasted stall_s."""

    __slots__ = ("_error", "_loop", "_since_s", "_stall_s", "_timeout", "_timer")

    def __init__(
        self, stall_s: float | None, error: Callable[[float], Exception] = is_silent
    ) -> None:
        """stall_s: None waits without end."""
        self._stall_s, self._error = stall_s, error
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._look_later()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError:
            assert self._stall_s is not None
            raise self._error(self._stall_s) from None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which it is the peer that is waited for, such as for one message."""
        self._since_s = self._loop.time()
        try:
            yield
        finally:
            self._since_s = None

    def _look_later(self) -> None:
        if self._stall_s is not None:
            self._timer = self._loop.call_later(self._stall_s / _NUM_LOOKS, self._look)

    def _look(self) -> None:
        assert self._stall_s is not None
        now_s = self._loop.time()
        if self._since_s is not None and now_s - self._since_s >= self._stall_s:
            self._timeout.reschedule(now_s)
        else:
            self._look_later()
