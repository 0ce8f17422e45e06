"""The event stream of one tab: a run's facts and progress, or all runs, and a beat."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final

from stratagem.client.dashboard.coordinator_watch import CoordinatorWatch
from stratagem.client.dashboard.page_queue import PageQueue
from stratagem.client.dashboard.page_values import server_sent
from stratagem.client.sdk.async_client import AsyncClient
from stratagem.client.sdk.views import Event
from stratagem.common.base.errors import NotFoundError, StratagemError
from stratagem.common.base.exception_text import told

BEAT_S: Final = 10.0
RETRY_S: Final = 2.0
"""Before the coordinator is asked again for what it has refused."""


class TabStream:
    """One tab's stream: what happens is put into its queue by tasks that end with it."""

    def __init__(self, client: AsyncClient, watch: CoordinatorWatch) -> None:
        self._client, self._watch = client, watch
        self._queue = PageQueue()
        self._next = 0
        """The event that comes next."""

    async def messages(self, run_id: str, from_index: int) -> AsyncIterator[bytes]:
        """Yield the messages of a run from an event on, or of all runs, until the reader goes or
        is cut."""
        work = self._follow_run(run_id, from_index) if run_id else self._follow_runs()
        tasks = [asyncio.create_task(self._beat()), asyncio.create_task(work)]
        self._watch.listeners.append(self._say_state)
        try:
            async for message in self._queue.messages():
                yield message
        finally:
            self._watch.listeners.remove(self._say_state)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            self._say_state()
            await asyncio.sleep(BEAT_S)

    def _say_state(self) -> None:
        state = self._watch.state
        told_so = {"state": state.state, "why": state.why, "silent_s": self._watch.silent_s}
        self._queue.replace("beat", server_sent("beat", {**told_so, "time_s": time.time()}))

    async def _follow_run(self, run_id: str, from_index: int) -> None:
        self._next = from_index
        while True:
            try:
                await self._run(run_id)
            except NotFoundError as error:
                self._queue.put(server_sent("gone", {"why": told(error)}))
                return
            except StratagemError:
                await asyncio.sleep(RETRY_S)  # the beat says what it is

    async def _run(self, run_id: str) -> None:
        """Follow a run to its end, and wait until something more happens to it."""
        run = await self._client.get(run_id)
        newest = (await run.status()).event_index
        async with aclosing(run.watch(min(self._next, newest + 1))) as items:
            async for item in items:
                if not isinstance(item, Event):
                    self._queue.replace("progress", server_sent("progress", item))
                    continue
                if item.index <= newest:
                    await self._queue.room()
                self._next = item.index + 1
                self._queue.put(server_sent("fact", item, item.index))
        self._queue.put(server_sent("end", {}))
        while (await run.status()).event_index < self._next:  # noqa: ASYNC110  (asked far away)
            await asyncio.sleep(RETRY_S)

    async def _follow_runs(self) -> None:
        while True:
            try:
                async for change in self._client.watch_runs():
                    await self._queue.room()
                    self._queue.put(server_sent("runs", change))
            except StratagemError:
                await asyncio.sleep(RETRY_S)
