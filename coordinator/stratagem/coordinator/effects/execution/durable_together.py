"""Lets facts about what becomes durable at about the same time share a transaction.

Updates that come in at once are on the disk within milliseconds of each other. Reported one by one,
each would have a transaction of its own, and all that follows from one. So who is done waits for
those that were under way by then: no longer than it has taken itself, and LONGEST_WAIT_S at most.
Lives on the event loop. Knows nothing of updates and facts.
"""

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

LONGEST_WAIT_S: Final = 0.05
"""Near the deadline of a round it decides whether an update counts, so it is short."""


@dataclass(slots=True)
class _Group:
    """Those who report together; nobody joins any more once the first of them is done."""

    num_missing: int = 0
    all_done: asyncio.Event = field(default_factory=asyncio.Event)


class Together:
    """The groups that can be joined, by what their members have in common."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Group] = {}

    @contextmanager
    def member(self, key: Hashable) -> Iterator["Membership"]:
        """Join for as long as the block lasts, or until `all_done` is waited for."""
        membership = Membership(self._open, key)
        try:
            yield membership
        finally:
            membership.leave()


class Membership:
    """One who makes something durable, and then reports it."""

    def __init__(self, open_groups: dict[Hashable, _Group], key: Hashable) -> None:
        self._open, self._key = open_groups, key
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()
        self._group = open_groups.setdefault(key, _Group())
        self._group.num_missing += 1
        self._is_missing = True

    async def all_done(self) -> None:
        """Be done, and wait for the others of the group: they all go on in one turn of the event
        loop. See the module for how long."""
        self.leave()
        patience_s = min(self._loop.time() - self._since_s, LONGEST_WAIT_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._group.all_done.wait()

    def leave(self) -> None:
        """Let nobody wait for this one any more."""
        if not self._is_missing:
            return
        self._is_missing = False
        if self._open.get(self._key) is self._group:
            del self._open[self._key]
        self._group.num_missing -= 1
        if self._group.num_missing == 0:
            self._group.all_done.set()
