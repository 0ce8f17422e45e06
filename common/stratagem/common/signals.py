"""How a process ends that has nothing to put in order yet.

Linux ignores a SIGTERM to the first process of a container unless the process has a handler, and
ours install theirs only once they serve: after the import of torch, or when they have the lead.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def leave_on(*numbers: signal.Signals) -> None:
    """From now on each of these signals ends the process with status 0, until it has a handler of
    its own."""
    for number in numbers:
        signal.signal(number, _leave)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(0)  # an orderly exit would wait for the thread that waits for the lead
