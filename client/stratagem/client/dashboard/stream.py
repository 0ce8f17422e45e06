"""Stream server-sent events about one run, or all runs, to a browser tab, with regular heartbeats.

Each tab is served at the pace at which it reads, and nothing is queued for it: a slow reader gets
all events, but later, and of everything else only the latest. A tab that reads nothing is cut off.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Final, cast

from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from stratagem.client.dashboard.values import server_sent
from stratagem.client.dashboard.watches import (
    RETRY_S,
    CoordinatorHealth,
    CoordinatorWatch,
    RunsWatch,
    RunWatch,
    SentRuns,
)
from stratagem.common.base.errors import StratagemError

BEAT_S: Final = 10.0
STALL_S: Final = 60.0
"""The time after which a tab that reads nothing is disconnected; it reconnects with the number of
the last event that it has seen."""


class TabStream:
    """The event stream of one browser tab."""

    def __init__(self, coordinator: CoordinatorWatch) -> None:
        self._coordinator = coordinator
        self._news = asyncio.Event()
        self._beat_s = time.monotonic() - BEAT_S
        self._beat_of: object = None
        self._next = 0
        """The index of the next event to send to the tab."""

    async def of_run(self, watch: RunWatch, index: int) -> AsyncGenerator[bytes]:
        """Yield a run's events, from an index on, and its progress, as server-sent events."""
        self._next = index
        num_progress, ended_at, is_gone = 0, -1, False
        with self._subscribed(watch):
            while True:
                self._news.clear()
                for beat in self._beats(watch):
                    yield beat
                if watch.is_ready:
                    async with aclosing(self._facts(watch)) as facts:
                        async for message in facts:
                            yield message
                if watch.progress and watch.num_progress != num_progress:
                    num_progress = watch.num_progress
                    yield watch.progress
                if self._next == watch.ended_at != ended_at:
                    ended_at = watch.ended_at
                    yield server_sent("end", {})
                if watch.gone and not is_gone:
                    is_gone = True
                    yield watch.gone
                await self._wait()

    async def of_runs(self, watch: RunsWatch) -> AsyncGenerator[bytes]:
        """Yield the list of all runs and its changes, as server-sent events."""
        seen = SentRuns()
        with self._subscribed(watch):
            while True:
                self._news.clear()
                for message in (*self._beats(watch), *watch.news(seen)):
                    yield message
                await self._wait()

    @contextmanager
    def _subscribed(self, watch: RunWatch | RunsWatch) -> Iterator[None]:
        on_change = self._news.set
        with (
            self._coordinator.subscription.subscribe(on_change),
            watch.subscription.subscribe(on_change),
        ):
            yield

    async def _facts(self, watch: RunWatch) -> AsyncGenerator[bytes]:
        """Yield the events that the tab lacks, with heartbeats between them."""
        self._next = min(self._next, watch.next)  # smaller if another run now has this name
        try:
            while self._next < watch.next:
                if self._next >= watch.first:
                    self._next += 1
                    yield watch.event(self._next - 1)
                    continue
                first = self._next
                past = watch.run.past(first, before_index=watch.first)
                async with aclosing(past) as pages:
                    async for page in pages:
                        for event in page:
                            self._next = event.index + 1
                            yield server_sent("fact", event, event.index)
                            for beat in self._beats(watch):
                                yield beat
                if self._next == first:  # the run was deleted
                    return
        except StratagemError:
            await asyncio.sleep(RETRY_S)  # the beat reports it
            self._news.set()

    def _beats(self, watch: RunWatch | RunsWatch) -> Iterator[bytes]:
        """Yield a heartbeat, with the state of the coordinator or the failure of the page, if that
        changed or a heartbeat is due."""
        trouble = watch.subscription.trouble or self._coordinator.subscription.trouble
        state = CoordinatorHealth("broken", trouble) if trouble else self._coordinator.state
        now_s = time.monotonic()
        if state == self._beat_of and now_s - self._beat_s < BEAT_S:
            return
        self._beat_of, self._beat_s = state, now_s
        told_so = {"state": state.state, "why": state.why, "silent_s": self._coordinator.silent_s}
        yield server_sent("beat", {**told_so, "time_s": time.time()})

    async def _wait(self) -> None:
        """Wait for news, or until a heartbeat is due."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(self._beat_s + BEAT_S - time.monotonic(), 0.0)):
                await self._news.wait()


class TabResponse(StreamingResponse):
    """A streaming HTTP response that ends promptly, even if the tab reads nothing."""

    async def stream_response(self, send: Send) -> None:
        """Send messages until the tab disconnects or is cut off."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALL_S):
                await send(message)

        body = cast("AsyncGenerator[bytes]", self.body_iterator)
        begin = {"type": "http.response.start", "status": self.status_code}
        with suppress(TimeoutError):
            async with aclosing(body) as messages:
                await send({**begin, "headers": self.raw_headers})
                async for message in messages:
                    await send_in_time(
                        {"type": "http.response.body", "body": message, "more_body": True}
                    )
        await send({"type": "http.response.body", "body": b"", "more_body": False})
