"""Forgets what is over: a chore of the leader that nothing waits for.

Owns when it is done; what may be forgotten is decided by the core.
"""

import asyncio
from typing import Final

from stratagem.coordinator.core.commands import ForgetWorkers
from stratagem.coordinator.loop import Loop
from stratagem.coordinator.settings import Settings

LONGEST_PAUSE_S: Final = 60.0


async def keep_house(loop: Loop, settings: Settings) -> None:
    """Forget, now and again, until cancelled."""
    after_s = settings.forget_workers_after
    pause_s = min(LONGEST_PAUSE_S, after_s / 4)
    while True:
        await loop.submit(ForgetWorkers(loop.clock.now() - after_s, settings.max_workers))
        await asyncio.sleep(pause_s)
