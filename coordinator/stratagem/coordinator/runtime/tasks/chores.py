"""Background tasks that nothing waits for: a chore outlives its caller, but not the process."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from stratagem.common.base.errors import StratagemError, UnavailableError, sole, told

log = structlog.get_logger()


class Chores:
    """The chores that are under way. An error of one is logged; the next one of its kind makes up
    for it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def do(self, coroutine: Coroutine[Any, Any, None], what: str) -> None:
        """Start a chore; `what` names it in the log."""
        task = asyncio.create_task(coroutine, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def close(self) -> None:
        """Cancel all chores and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        error = error and sole(error)
        if isinstance(error, UnavailableError):  # a worker that is gone needs nothing more
            log.info("chore not done", what=task.get_name(), reason=told(error))
        elif isinstance(error, OSError | StratagemError):
            log.warning("chore failed", what=task.get_name(), reason=told(error))
        elif error is not None:
            log.error("chore failed", what=task.get_name(), exc_info=error)
