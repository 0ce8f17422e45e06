"""Returns free memory to the system in the pauses between transfers.

The allocator is tuned to keep memory that it once had (common/process/process.py), which makes
transfers fast; how much it keeps depends on how many chunks once waited for the disk together. In a
pause that memory is not needed.
"""

import asyncio
from collections.abc import Callable
from typing import Final

TRIM_PAUSE_S: Final = 10.0


async def rest(
    num_bytes_moved: Callable[[], int],
    give_back: Callable[[], object],
    pause_s: float = TRIM_PAUSE_S,
) -> None:
    """Call give_back once in every pause of at least pause_s seconds, until cancelled."""
    given = seen = num_bytes_moved()
    while True:
        await asyncio.sleep(pause_s)
        now = num_bytes_moved()
        if now == seen and now != given:
            await asyncio.to_thread(give_back)
            given = now
        seen = now
