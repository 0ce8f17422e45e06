"""Detect a stalled thread: when to report it, when to end the process, and what its stack says of
the cause.

A step may take any time, so nothing is a fault until another task needs the thread.
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
"""A stay is long if it takes this many times as long as any that has ended before."""
AGAIN: Final = 1.5
"""A stall is reported again when it has lasted so many times as long as the last time."""
LATE: Final = 10.0
"""A pause between two looks counts as so many times as long as it should be at most."""
MAX_NAMED: Final = 3
"""Members that are named one by one."""

_OURS: Final = "stratagem.worker."
_WAITING: Final = ("exchange.", "mesh.", "party.", "session.control", "pipeline.store")
"""Modules that the torch thread stays in only to wait for others."""
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
    """report_s: from when on a stay is reported. grace_s: how long a plan that was ended may keep
    the thread at one thing while others wait for it. compile_s: added to that where it may be long
    for once."""

    report_s: float = 60.0
    grace_s: float = 30.0
    compile_s: float = 900.0

    def patience_s(self, *, is_run_over: bool, has_stepped: bool, is_compiling: bool) -> float:
        """Return how long the thread may stay at one thing that nobody wants, while others wait.

        A run that goes on comes back to a process that takes its place, and would be late there
        again: its first step here, of which nobody knows how long it takes, is given more time. A
        run that is over does not come back.
        """
        is_first = not (is_run_over or has_stepped)
        return self.grace_s + (self.compile_s if is_first or is_compiling else 0.0)


@dataclass(frozen=True, slots=True)
class ThreadStay:
    """How long a thread has been at one thing, as those know who look at it now and then."""

    num_moves: int
    since_s: float
    longest_s: float = 0.0
    """The longest stay of the same run that has ended."""

    def seen(self, num_moves: int, now_s: float) -> "ThreadStay":
        """Return the stay that a look at the thread shows."""
        if num_moves == self.num_moves:
            return self
        longest_s = max(self.longest_s, now_s - self.since_s)
        return replace(self, num_moves=num_moves, since_s=now_s, longest_s=longest_s)

    def is_long(self, now_s: float, limit_s: float) -> bool:
        """Return whether it is to be reported: it is longer than the limit, and than usual."""
        return now_s - self.since_s >= max(limit_s, USUAL * self.longest_s)

    def is_hopeless(self, now_s: float, patience_s: float, *, wanted_s: float) -> bool:
        """Return whether the thread has to be given up to be had back: others have waited for it
        since wanted_s, and for longer than the limit, and than usual, it has not moved since."""
        waited_s = now_s - max(wanted_s, self.since_s)
        return waited_s >= max(patience_s, USUAL * self.longest_s)


class StackFrame(NamedTuple):
    """A frame of a Python thread."""

    module: str
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The frame in words."""
        return f"{self.file.rpartition('/')[2]}, line {self.line}, in {self.function}"


@dataclass(frozen=True, slots=True)
class StallCause:
    """What a stack says about the thread that stays in it."""

    place: str = ""
    """Where it is: the innermost line of the user's code, or that of a library."""
    awaits: str = ""
    """Whom it waits for; empty: nobody."""


def cause_of(stack: Sequence[StackFrame], others: Sequence[str]) -> StallCause:
    """Return what a stack, innermost frame first, says; others: the other members of the party.

    The innermost frame that is the user's or ours decides: libraries work for either.
    """
    told = [frame for frame in stack if _is_ours(frame) or _is_users(frame)]
    if told and _is_users(told[0]):
        return StallCause(place=told[0].place)
    ours = [frame.module.removeprefix(_OURS) for frame in told if _is_ours(frame)]
    if ours and ours[0].startswith(_READERS):
        return StallCause(place="in the processes that read rows, data.readers")
    if ours and ours[0].startswith(_WAITING):
        awaits = next((text for name in ours if (text := _awaited(name))), "{others}")
        if others or "{others}" not in awaits:
            return StallCause(awaits=awaits.format(others=_names(others)))
        return StallCause(place=told[0].place)
    return StallCause(place=stack[0].place if stack else "")


def is_compiling(stack: Sequence[StackFrame]) -> bool:
    """Return whether torch compiles code in this stack; to run what is compiled is something
    else."""
    return any(frame.module.startswith(_COMPILERS) for frame in stack)


def counted_s(seconds: float, pause_s: float) -> float:
    """Return how much of the time between two looks counts: a process that was suspended meanwhile
    has not been at anything."""
    return min(seconds, LATE * pause_s)


def is_due_again(seconds: float, told_s: float) -> bool:
    """Return whether a stall is told once more, which was told when it had lasted told_s."""
    return seconds >= AGAIN * told_s


def _names(others: Sequence[str]) -> str:
    return ", ".join(others) if len(others) <= MAX_NAMED else "the other members"


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
