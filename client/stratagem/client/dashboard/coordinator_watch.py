"""How the coordinator is, as the page says it: asked at intervals, for all tabs together."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from stratagem.client.dashboard.followed import Followed
from stratagem.client.sdk.async_client import AsyncClient
from stratagem.common.base.errors import (
    PermissionDeniedError,
    StandbyError,
    StratagemError,
    UnauthenticatedError,
    WrongStateError,
    told,
)

ASK_PAUSE_S: Final = 2.0
"""Between two questions to the coordinator."""
ANSWER_S: Final = 5.0
"""A coordinator that takes longer is away."""


@dataclass(frozen=True, slots=True)
class CoordinatorHealth:
    """What the banner of the page says."""

    state: str = "connecting"
    """live, away, standby, denied, version, connecting, or broken: of the page itself."""
    why: str = ""


class CoordinatorWatch:
    """Asks the coordinator at intervals whether it answers; all tabs hear when that changes."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.state = CoordinatorHealth()
        self.answered_s: float | None = None
        """When it has answered last, by the clock of this process."""
        self._asked_s = -ASK_PAUSE_S
        self._began_s: float | None = None
        """When it was asked first."""
        self._followed = Followed("the coordinator", self._follow)

    @property
    def trouble(self) -> str:
        """Return what went wrong in asking just now."""
        return self._followed.trouble

    def looked_at(self, tell: Callable[[], None]) -> AbstractContextManager[None]:
        """Ask at intervals; tell: is called when the state changes."""
        return self._followed.looked_at(tell)

    async def _follow(self) -> bool:
        await asyncio.sleep(self._asked_s + ASK_PAUSE_S - time.monotonic())
        self._asked_s = time.monotonic()
        self._began_s = self._asked_s if self._began_s is None else self._began_s
        self._take(await self._asked())
        return True

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last answer, or else since the first question."""
        since_s = self._began_s if self.answered_s is None else self.answered_s
        return 0.0 if since_s is None else time.monotonic() - since_s

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
            self._followed.tell()


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
