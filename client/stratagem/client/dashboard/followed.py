"""What the page follows for all tabs together: in one task, while somebody looks at it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from stratagem.common.base.errors import StratagemError

RETRY_S: Final = 2.0
"""Before the coordinator is asked again for what it has refused, or for a run that has ended."""
TROUBLE_S: Final = 15.0
"""For how long tabs are told of a failure, longer than until their next beat."""

log = logging.getLogger("stratagem.client")


def nothing() -> None:
    """Do nothing."""


class Followed:
    """Something that is followed in one task, for all who look at it. Whatever goes wrong in it, it
    is begun again."""

    def __init__(
        self,
        what: str,
        follow: Callable[[], Awaitable[bool]],
        begin: Callable[[], None] = nothing,
        end: Callable[[], None] = nothing,
    ) -> None:
        """what: for the log. follow: returns True to be called again, False when there is nothing
        more to follow. begin, end: called before the first one looks, and after the last."""
        self._what, self._follow, self._begin, self._end = what, follow, begin, end
        self._readers: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._why, self._failed_s = "", -TROUBLE_S

    @property
    def is_on(self) -> bool:
        """Return whether somebody looks."""
        return self._task is not None

    @property
    def trouble(self) -> str:
        """Return what went wrong just now that nobody had thought of; "" where nothing did."""
        return self._why if time.monotonic() - self._failed_s < TROUBLE_S else ""

    @contextmanager
    def looked_at(self, tell: Callable[[], None]) -> Iterator[None]:
        """Follow; tell: is called when something has happened."""
        self._readers.append(tell)
        if self._task is None:
            self._begin()
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._readers.remove(tell)
            if not self._readers:
                self._task.cancel()
                self._task = None
                self._end()

    def tell(self) -> None:
        """Tell all who look that something has happened."""
        for tell in self._readers:
            tell()

    async def _run(self) -> None:
        while True:
            try:
                if not await self._follow():
                    return
            except StratagemError:
                await asyncio.sleep(RETRY_S)  # the beat says what it is
            except Exception as error:
                log.exception("the page follows %s no further; it begins again", self._what)
                self._why = f"an error in following {self._what}: {error!r}; it begins again"
                self._failed_s = time.monotonic()
                self.tell()
                await asyncio.sleep(RETRY_S)
