"""Admission control of a server: requests must arrive in time, and the number of open calls is
limited.

A caller that is silent inside a request, or sends it a byte at a time, would otherwise keep its
call open forever: gRPC itself sets no deadline. So calls with one request are received like streams
(on the wire they are the same), which also detects calls without a request.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from stratagem.common.base.errors import InvalidInputError, LimitError

MALFORMED: Final = object()
"""A placeholder that a deserializer returns for a request that does not parse."""

RETRY_AFTER_S: Final = 1.0
"""The seconds after which a caller that hit the limit on open calls is told to retry."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The limits of one server.

    idle_timeout_s: the time within which a request must arrive, and a caller must take an answer,
    except for the methods in `unhurried`. max_calls: the number of open calls, except for the
    methods in `unlimited`, which keep workers alive and must not wait for clients.
    """

    idle_timeout_s: float = 30.0
    max_calls: int = 4096
    unlimited: Collection[str] = ()
    unhurried: Collection[str] = ()


DEFAULT_LIMITS: Final = CallLimits()


class Admission:
    """The counter of a server's open calls, which enforces the limit; for use on the event loop."""

    def __init__(self, limits: CallLimits) -> None:
        self.limits = limits
        self.num_open = 0

    @contextmanager
    def entered(self, method: str) -> Iterator[None]:
        """Context manager that counts a call as open in its block. Raises LimitError if too many
        calls are open. method: the call's full path."""
        if method.rpartition("/")[2] in self.limits.unlimited:
            yield
            return
        if self.num_open >= self.limits.max_calls:
            raise LimitError(
                f"max_calls: {self.num_open} calls are open, the limit is {self.limits.max_calls}",
                retry_after_s=RETRY_AFTER_S,
            )
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


async def only_request(requests: AsyncIterator[Any], idle_timeout_s: float) -> Any:
    """Receive and return the single request of a call that is not a request stream."""
    try:
        async with asyncio.timeout(idle_timeout_s):
            request = await anext(requests, None)
    except TimeoutError:
        raise TimeoutError(f"the request did not arrive within {idle_timeout_s:g} s") from None
    if request is None:
        raise InvalidInputError.at("request", "is missing: the call ended without one")
    return parsed(request)


def parsed(request: Any) -> Any:
    """Return the request that was deserialized. Raises InvalidInputError if it is MALFORMED."""
    if request is MALFORMED:
        raise InvalidInputError.at("request", "does not parse as the message of this call")
    return request


class ParsedStream:
    """An iterator over requests that raises InvalidInputError at the first malformed one."""

    __slots__ = ("_requests",)

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return parsed(await anext(self._requests))
