"""The present activity of a thread, which other threads may look at.

A thread notes it whenever it enters or leaves the user's code, for a fraction of a microsecond and
without reading a clock: those who look at it every now and then see that the number of moves has
not changed, and since when.
"""

import threading


class Activity:
    """What a thread is doing. Written by that thread alone."""

    __slots__ = ("num_moves", "text")

    def __init__(self) -> None:
        self.text = ""
        """In the words of errors, such as "training step 12"; empty outside of the user's code."""
        self.num_moves = 0

    def move(self, text: str) -> None:
        """Note that the thread does something else from now on."""
        self.text = text
        self.num_moves += 1


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.activity = Activity()


_here = _PerThread()


def here() -> Activity:
    """Return the activity of the calling thread."""
    return _here.activity


def note_in(activity: Activity) -> None:
    """Have the calling thread note what it does in this object, which others look at."""
    _here.activity = activity
