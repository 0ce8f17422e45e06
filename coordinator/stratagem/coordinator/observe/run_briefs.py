"""Briefs of the runs that change, for everyone who follows all runs: each is made once, however
many follow, and twice a second at most."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from stratagem.common.base.ids import RunId

PAUSE_S: Final = 0.5
"""Seconds between two looks at what has changed."""

Brief = TypeVar("Brief")


@dataclass(slots=True, eq=False)
class Follower(Generic[Brief]):
    """One who follows all runs, and what has not been taken yet: the newest brief of each run."""

    waiting: dict[RunId, Brief | None] = field(default_factory=dict)
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    async def news(self) -> Mapping[RunId, Brief | None]:
        """Wait for changed runs; None: that one is gone."""
        await self.has_news.wait()
        self.has_news.clear()
        news, self.waiting = self.waiting, {}
        return news


class RunBriefs(Generic[Brief]):
    """The followers of all runs, and the runs that have changed since they were told."""

    def __init__(
        self,
        brief_of: Callable[[RunId], Awaitable[Brief | None]],
        do: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        """brief_of: makes the brief of a run, None when it is gone; do: starts a chore under a
        name."""
        self._brief_of, self._do = brief_of, do
        self._followers: list[Follower[Brief]] = []
        self._changed: dict[RunId, None] = {}
        self._is_telling = False

    def note(self, run_id: RunId) -> None:
        """Take in that there is something new of a run."""
        if not self._followers:
            return
        self._changed[run_id] = None
        if not self._is_telling:
            self._is_telling = True
            self._do(self._tell(), "tell who follows all runs")

    @contextmanager
    def follower(self) -> Iterator[Follower[Brief]]:
        """Follow all runs, from now on."""
        follower = Follower[Brief]()
        self._followers.append(follower)
        try:
            yield follower
        finally:
            self._followers.remove(follower)

    async def _tell(self) -> None:
        """Tell all followers what has changed, until nothing has for one pause."""
        try:
            while self._changed and self._followers:
                changed, self._changed = self._changed, {}
                for run_id in changed:
                    brief = await self._brief_of(run_id)
                    for follower in self._followers:
                        follower.waiting[run_id] = brief
                        follower.has_news.set()
                await asyncio.sleep(PAUSE_S)
        finally:
            self._is_telling = False
