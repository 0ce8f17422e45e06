"""An event loop in a thread, for callers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stratagem.client.sdk.connection.fork_safety import check_fork, is_lost

if TYPE_CHECKING:
    pass

Value = TypeVar("Value")

_END: Final = object()


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report_unless_poller)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="stratagem-client", daemon=True
        )
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Run to the end and give back the result; an interrupt cancels the coroutine."""
        if is_lost():  # the thread is not in this fork
            coroutine.close()
            check_fork()
        tasks: list[asyncio.Task[Value]] = []

        async def tracked() -> Value:
            tasks.append(asyncio.current_task())  # type: ignore[arg-type]
            return await coroutine

        future: Future[Value] | None = None
        try:
            future = asyncio.run_coroutine_threadsafe(tracked(), self._loop)
            return future.result()
        except BaseException:
            # An interrupt may come at any instant, also before the future is in our hands.
            if future is None or not future.done():
                # Not before it has ended may the caller do something else with what it used.
                asyncio.run_coroutine_threadsafe(_cancelled(tasks), self._loop).result()
            raise

    def iterate(
        self, source: AsyncIterator[Value], timeout_s: float | None = None
    ) -> Iterator[Value]:
        """The items as they come; leaving the loop early closes the source.

        timeout_s: raise TimeoutError, and close the source, when the next item is not there so long
        after the first one was asked for.
        """
        deadline_s = None if timeout_s is None else self._loop.time() + timeout_s

        async def advance() -> Value | object:
            async with asyncio.timeout_at(deadline_s):
                return await anext(source, _END)

        async def close() -> None:
            aclose = getattr(source, "aclose", None)
            if aclose is not None:
                await aclose()

        try:
            while (item := self.call(advance())) is not _END:
                yield item  # type: ignore[misc]
        finally:
            if (
                not self._loop.is_closed() and not is_lost()
            ):  # closing the loop has closed the source
                self.call(close())

    def close(self) -> None:
        """Nothing in a fork, where neither the loop nor what it has open is ours."""
        if is_lost():
            return
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _finish(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait for their end.

    What was handed to the loop before this has begun by now, so `tasks` names it.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _report_unless_poller(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """gRPC wakes every loop of a process for each event; all but one then find nothing to read."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
