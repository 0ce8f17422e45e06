"""Detect a stalled thread: the times to report it and to end the process, and the cause by its
stack.

A step may take any time, so a stall is no fault until another task needs the thread.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

# ---- Rules for stalls ----
#
# The rules are pure functions.

USUAL: Final = 2.0
"""A thread's stay at one activity is long if it exceeds the longest earlier one by this factor."""
AGAIN: Final = 1.5
"""A stall is reported again when its duration has grown by this factor."""
LATE: Final = 10.0
"""A pause between two checks counts as at most this multiple of its planned length."""
MAX_NAMED: Final = 3
"""Maximum number of members named in a report."""

_OURS: Final = "stratagem.worker."
_WAITING: Final = ("exchange.", "mesh.", "party.", "session.control", "pipeline.store")
"""Modules in which the torch thread only waits for other members."""
_AWAITED: Final = (
    ("party.state", "the state of {others}"),
    ("party.", "{others} to join"),
    ("exchange.parameter_server", "the coordinator to add up a step"),
    ("exchange.", "{others} in the exchange of a step"),
    ("pipeline.", "{others} in a step of the pipeline"),
    ("session.context", "a state or data from the coordinator"),
)
_COMPILERS: Final = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx", "triton.compiler")
_READERS: Final = "data.reader"
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Time limits for stalls.

    report_s: after this time a stay is reported. grace_s: how long the torch thread may stay in an
    ended plan while others wait for it. compile_s: added where a single stay may be long.
    """

    report_s: float = 60.0
    grace_s: float = 30.0
    compile_s: float = 900.0

    def patience_s(self, *, is_run_over: bool, has_stepped: bool, is_compiling: bool) -> float:
        """Return how long a thread may stay in unneeded work while others wait for it.

        An unfinished run would come back after a restart of the process and be slow there again, so
        its first step here, of unknown duration, gets more time. A finished run does not come back.
        """
        is_first = not (is_run_over or has_stepped)
        return self.grace_s + (self.compile_s if is_first or is_compiling else 0.0)


@dataclass(frozen=True, slots=True)
class ThreadStay:
    """The stay of a thread at one activity, as observed from outside."""

    num_moves: int
    since_s: float
    longest_s: float = 0.0
    """The longest stay at one activity of the same run that has ended."""

    def seen(self, num_moves: int, now_s: float) -> "ThreadStay":
        """Return the stay updated by an observation: number of activity changes, and the time."""
        if num_moves == self.num_moves:
            return self
        longest_s = max(self.longest_s, now_s - self.since_s)
        return replace(self, num_moves=num_moves, since_s=now_s, longest_s=longest_s)

    def is_long(self, now_s: float, limit_s: float) -> bool:
        """Return whether to report the stay: it exceeds the limit and is longer than usual."""
        return now_s - self.since_s >= max(limit_s, USUAL * self.longest_s)

    def is_hopeless(self, now_s: float, patience_s: float, *, wanted_s: float) -> bool:
        """Return whether only the end of the process can free the thread: others have waited since
        wanted_s, and since then it has not moved for longer than patience_s and than usual."""
        waited_s = now_s - max(wanted_s, self.since_s)
        return waited_s >= max(patience_s, USUAL * self.longest_s)


class StackFrame(NamedTuple):
    """A frame of a Python thread's stack."""

    module: str
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """File, line and function, for display."""
        return f"{self.file.rpartition('/')[2]}, line {self.line}, in {self.function}"


@dataclass(frozen=True, slots=True)
class StallCause:
    """The cause of a stall as shown by a stack."""

    place: str = ""
    """The innermost line of the user's code, else of a library."""
    awaits: str = ""
    """The process that the thread waits for; "" if it waits for none."""


def cause_of(stack: Sequence[StackFrame], others: Sequence[str]) -> StallCause:
    """Return the cause of a stall shown by a stack. others: the other members of the party.

    The innermost frame of the user's code or of Stratagem decides, since libraries serve both.
    """
    relevant = [frame for frame in stack if _is_ours(frame) or _is_users(frame)]
    if relevant and _is_users(relevant[0]):
        return StallCause(place=relevant[0].place)
    ours = [frame.module.removeprefix(_OURS) for frame in relevant if _is_ours(frame)]
    if ours and ours[0].startswith(_READERS):
        return StallCause(place="in the processes that read rows, data.readers")
    if ours and ours[0].startswith(_WAITING):
        awaits = next((text for name in ours if (text := _awaited(name))), "{others}")
        if others or "{others}" not in awaits:
            names = ", ".join(others) if len(others) <= MAX_NAMED else "the other members"
            return StallCause(awaits=awaits.format(others=names))
        return StallCause(place=relevant[0].place)
    return StallCause(place=stack[0].place if stack else "")


def is_compiling(stack: Sequence[StackFrame]) -> bool:
    """Return whether the stack shows torch compiling code."""
    return any(frame.module.startswith(_COMPILERS) for frame in stack)


def counted_s(seconds: float, pause_s: float) -> float:
    """Return how many seconds between two checks count: fewer if the process was suspended."""
    return min(seconds, LATE * pause_s)


def is_due_again(seconds: float, told_s: float) -> bool:
    """Return whether to report a stall again. told_s: its duration at the last report."""
    return seconds >= AGAIN * told_s


def _awaited(name: str) -> str:
    return next((text for start, text in _AWAITED if name.startswith(start)), "")


def _is_ours(frame: StackFrame) -> bool:
    return frame.module.startswith(_OURS)


def _is_users(frame: StackFrame) -> bool:
    top = frame.module.partition(".")[0]
    is_library = top in sys.stdlib_module_names or any(part in frame.file for part in _INSTALLED)
    return not (is_library or top == "stratagem" or frame.file.startswith("<"))


# ---- Activity of a thread ----
#
# A thread notes its activity whenever it enters or leaves the user's code, for a fraction of a
# microsecond and without reading a clock: observers who look from time to time see that the number
# of moves has not changed, and since when.


def _nothing() -> None: ...


class Activity:
    """The present activity of a thread, written only by that thread."""

    __slots__ = ("check", "num_moves", "text")

    def __init__(self) -> None:
        self.text = ""
        """The activity, as in errors ("training step 12"); empty outside of the user's code."""
        self.num_moves = 0
        """Number of changes of activity; a rising number shows progress."""
        self.check: Callable[[], None] = _nothing
        """Called between parts of a step; raises if the thread's work is not needed any more."""


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.activity = Activity()


per_thread: Final = _PerThread()
"""The activity of the calling thread, which watchers read from other threads."""


def moved() -> None:
    """Record progress of the calling thread during long work."""
    per_thread.activity.num_moves += 1


@contextmanager
def checking(check: Callable[[], None]) -> Iterator[None]:
    """Context manager inside which `check` is called between parts of a step, and may raise."""
    here = per_thread.activity
    outer, here.check = here.check, check
    try:
        yield
    finally:
        here.check = outer
