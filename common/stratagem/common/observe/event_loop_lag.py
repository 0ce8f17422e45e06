"""Measures how late the event loop is: everything that must answer soon waits for it.

A task sleeps a fixed time and looks how much longer it took. A loop that is blocked, and a process
that is frozen, show as one long lag afterwards.
"""

import asyncio
from typing import Final

from stratagem.common.observe.metric_definition import Durations

INTERVAL_S: Final = 0.25
BOUNDS_S: Final = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class LoopLag:
    """Measures the lag of the event loop that `run` is a task of."""

    def __init__(self) -> None:
        self.seconds = Durations(BOUNDS_S)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.seconds.add(loop.time() - due_s)
