"""A call in which this worker asks for signed requests, and says what it has done with them.

Owns the asking: what is wanted goes out in as few messages as there are moments to send one, and
each URL comes to whoever waits for it. Lives on the event loop. Knows nothing of states.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from stratagem.common.base.errors import InvalidInputError, UnavailableError
from stratagem.v1 import worker_pb2 as pb

MAX_ASKED: Final = 64
"""Leaves in one message: their URLs have at most half a megabyte."""

R = TypeVar("R", pb.PutLeavesResponse, pb.FetchStateResponse)


class SignedStream(Generic[R]):
    """The two directions of one call."""

    def __init__(
        self, requests: AsyncIterator[Any], make: Callable[..., R], idle_timeout_s: float
    ) -> None:
        """requests: of the call, behind its header. idle_timeout_s: the longest wait for a URL."""
        self._requests, self._idle_timeout_s = requests, idle_timeout_s
        self._make: Callable[..., R] = make
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._asked: deque[pb.AskedLeaf] = deque()
        self._said: deque[R] = deque()
        self._changed = asyncio.Event()
        self._is_over = False

    def say(self, response: R) -> None:
        """Send a response, behind those before it."""
        self._said.append(response)
        self._changed.set()

    async def url(self, number: int, digest: bytes = b"") -> str:
        """Ask for the signed request of a leaf, and wait for it. Raises UnavailableError when it
        does not come."""
        if self._is_over:
            raise UnavailableError("the coordinator signs nothing more")
        self._asked.append(pb.AskedLeaf(number=number, digest=digest))
        self._changed.set()
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await waiting
        except TimeoutError:
            text = f"the coordinator has signed nothing for {self._idle_timeout_s:g} s"
            raise UnavailableError(text) from None
        finally:
            self._waiting.pop(number, None)

    async def responses(self, work: Coroutine[Any, Any, None]) -> AsyncGenerator[R, None]:
        """Yield what is said and asked while the work is done; raise what it raises."""
        reading, working = asyncio.create_task(self._read()), asyncio.create_task(work)
        for task in (reading, working):
            task.add_done_callback(lambda _: self._changed.set())
        try:
            is_done = False
            while not is_done:
                await self._changed.wait()
                self._changed.clear()
                if reading.done() and reading.exception() is not None:
                    reading.result()
                is_done = working.done()
                while (response := self._next()) is not None:
                    yield response
            working.result()
        finally:
            reading.cancel()
            working.cancel()
            await asyncio.gather(reading, working, return_exceptions=True)

    def _next(self) -> R | None:
        if self._said:
            return self._said.popleft()
        if not self._asked:
            return None
        asked = pb.AskedLeaves()
        while self._asked and len(asked.leaves) < MAX_ASKED:
            asked.leaves.append(self._asked.popleft())
        return self._make(asked=asked)

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                if request.WhichOneof("message") != "signed":
                    raise InvalidInputError.at("message", "signed requests must follow the header")
                for signed in request.signed.requests:
                    waiting = self._waiting.get(signed.number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(signed.url)
        finally:
            self._is_over = True
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(UnavailableError("the coordinator signs nothing more"))
