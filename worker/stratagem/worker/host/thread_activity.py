"""The present activity of a thread, which other threads may look at.

A thread notes it whenever it enters or leaves the user's code, for a fraction of a microsecond and
without reading a clock: those who look at it every now and then see that the number of moves has
not changed, and since when.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final


def _nothing() -> None: ...


class Activity:
    """What a thread is doing. Written by that thread alone."""

    __slots__ = ("check", "num_moves", "text")

    def __init__(self) -> None:
        self.text = ""
        """In the words of errors, such as "training step 12"; empty outside of the user's code."""
        self.num_moves = 0
        """Grows whenever the thread does something else."""
        self.check: Callable[[], None] = _nothing
        """Raises once nobody wants what the thread does; called between parts of a step."""


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.activity = Activity()


per_thread: Final = _PerThread()
"""Has the activity of the calling thread; one that is watched puts an object there that others
look at."""


def moved() -> None:
    """Note that the calling thread has come on with something that takes long."""
    per_thread.activity.num_moves += 1


@contextmanager
def checking(check: Callable[[], None]) -> Iterator[None]:
    """Have the parts of a step end by what `check` raises, in the calling thread."""
    here = per_thread.activity
    outer, here.check = here.check, check
    try:
        yield
    finally:
        here.check = outer
