"""How the coordinator is, as the page says it: asked at intervals, for all tabs together."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from stratagem.client.sdk.async_client import AsyncClient
from stratagem.common.base.errors import (
    PermissionDeniedError,
    StandbyError,
    StratagemError,
    UnauthenticatedError,
    WrongStateError,
)
from stratagem.common.base.exception_text import told

ASK_PAUSE_S: Final = 2.0
"""Between two questions to the coordinator."""
ANSWER_S: Final = 5.0
"""A coordinator that takes longer is away."""


@dataclass(frozen=True, slots=True)
class CoordinatorHealth:
    """What the banner of the page says."""

    state: str = "connecting"
    """live, away, standby, denied, version or connecting."""
    why: str = ""


@dataclass(slots=True)
class CoordinatorWatch:
    """Asks the coordinator at intervals whether it answers; all tabs hear when that changes."""

    client: AsyncClient
    _listeners: list[Callable[[], None]] = field(default_factory=list)
    _is_watched: asyncio.Event = field(default_factory=asyncio.Event)
    state: CoordinatorHealth = field(default_factory=CoordinatorHealth)
    answered_s: float | None = None
    """When it has answered last, by the clock of this process."""

    async def run(self) -> None:
        """Ask until cancelled, while somebody wants to know."""
        while True:
            await self._is_watched.wait()
            self._take(await self._asked())
            await asyncio.sleep(ASK_PAUSE_S)

    @contextmanager
    def listened_to(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call the listener when the state changes."""
        self._listeners.append(listener)
        self._is_watched.set()
        try:
            yield
        finally:
            self._listeners.remove(listener)
            if not self._listeners:
                self._is_watched.clear()

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer."""
        return 0.0 if self.answered_s is None else time.monotonic() - self.answered_s

    async def _asked(self) -> CoordinatorHealth:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.client.workers()
        except TimeoutError:
            return CoordinatorHealth("away", f"{self.client.address} does not answer")
        except StratagemError as error:
            state, has_been = state_of(error), self.answered_s is not None
            is_away = state == "away" and has_been  # the words of a broken connection help nobody
            why = f"{self.client.address} does not answer" if is_away else told(error)
            return CoordinatorHealth(state, why)
        self.answered_s = time.monotonic()
        return CoordinatorHealth("live")

    def _take(self, state: CoordinatorHealth) -> None:
        if state != self.state:
            self.state = state
            for listener in self._listeners:
                listener()


def state_of(error: StratagemError) -> str:
    """Return the word of the banner for a call that has failed."""
    match error:
        case StandbyError():
            return "standby"
        case UnauthenticatedError() | PermissionDeniedError():
            return "denied"
        case WrongStateError():
            return "version"
        case _:
            return "away"
