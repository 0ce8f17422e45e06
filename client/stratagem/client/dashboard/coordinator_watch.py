"""How the coordinator is, as the page says it: asked at intervals, for all tabs together."""

import asyncio
import time
from collections.abc import Callable
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
    listeners: list[Callable[[], None]] = field(default_factory=list)
    state: CoordinatorHealth = field(default_factory=CoordinatorHealth)
    answered_s: float | None = None
    """When it has answered last, by the clock of this process."""

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._take(await self._asked())
            await asyncio.sleep(ASK_PAUSE_S)

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
            return CoordinatorHealth(state_of(error), told(error))
        self.answered_s = time.monotonic()
        return CoordinatorHealth("live")

    def _take(self, state: CoordinatorHealth) -> None:
        if state != self.state:
            self.state = state
            for listener in self.listeners:
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
