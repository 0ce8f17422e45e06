"""Task groups that keep a cancellation apart from a failure of one of their tasks.

A TaskGroup of Python before 3.13 that is cancelled while one of its tasks fails raises the failure
alone. Code that catches failures and continues must ask here whether it should. Such a group also
counts its own task as cancelled permanently when a member fails after the body has ended, so code
that may ask later uses `task_group`.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


def stop_if_cancelled() -> None:
    """Raise CancelledError when the cancellation of the present task was requested."""
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open an asyncio.TaskGroup whose failures leave no cancellation behind."""
    group = asyncio.TaskGroup()
    was_requested = False
    try:
        async with group:
            try:
                yield group
            finally:
                was_requested = _has_cancelled_its_task(group)
    finally:
        task = asyncio.current_task()
        if task is not None and not was_requested and _has_cancelled_its_task(group):
            task.uncancel()


def _has_cancelled_its_task(group: asyncio.TaskGroup) -> bool:
    if sys.version_info >= (3, 13):
        return False  # it takes that back by itself
    return bool(group._parent_cancel_requested)  # type: ignore[attr-defined]
