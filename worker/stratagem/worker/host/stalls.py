"""Rules about a thread that stays at one thing: from when on that is reported, when the process has
to end because of it, and what its stack says of the cause.

Pure functions. A step may take any time, so nothing is a fault until somebody wants the thread.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

USUAL: Final = 2.0
"""A stay is long if it takes this many times as long as any that has ended before."""
PATIENCE: Final = 4.0
"""A plan that was ended and does move on is given so many times the grace in all."""
AGAIN: Final = 1.5
"""A stall is reported again when it has lasted so many times as long as the last time."""
MAX_NAMED: Final = 3
"""Members that are named one by one."""

_OURS: Final = "stratagem.worker."
_WAITING: Final = ("exchange.", "mesh.", "party.", "session.plan_control", "pipeline.store_trans")
"""Modules that the torch thread stays in only to wait for others."""
_AWAITED: Final = (
    ("party.live_state", "the state of {others}"),
    ("party.", "{others} to join"),
    ("exchange.parameter_server.", "the coordinator to add up a step"),
    ("exchange.", "{others} in the exchange of a step"),
    ("pipeline.", "{others} in a step of the pipeline"),
    ("session.context", "a state or data from the coordinator"),
)
_READERS: Final = "data.reader."
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True, slots=True)
class StallLimits:
    """report_s: from when on a stay is reported. grace_s: how long a plan that was ended may keep
    the thread."""

    report_s: float = 60.0
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ThreadStay:
    """How long a thread has been at one thing, as those know who look at it now and then."""

    num_moves: int
    since_s: float
    longest_s: float = 0.0
    """The longest stay of the same plan that has ended."""

    def seen(self, num_moves: int, now_s: float) -> "ThreadStay":
        """Return the stay that a look at the thread shows."""
        if num_moves == self.num_moves:
            return self
        longest_s = max(self.longest_s, now_s - self.since_s)
        return replace(self, num_moves=num_moves, since_s=now_s, longest_s=longest_s)

    def is_long(self, now_s: float, limit_s: float) -> bool:
        """Return whether it is to be reported: it is longer than the limit, and than usual."""
        return now_s - self.since_s >= max(limit_s, USUAL * self.longest_s)

    def is_hopeless(self, now_s: float, limits: StallLimits, *, ended_s: float | None) -> bool:
        """Return whether the thread has to be given up to be had back: it is at something that
        nobody wants since ended_s (None: since the limits say that it takes too long), and has not
        moved for the grace, or has not come to an end for several times as long."""
        if ended_s is None:
            return self.is_long(now_s, max(limits.report_s, limits.grace_s))
        grace_s = max(limits.grace_s, USUAL * self.longest_s)
        is_stuck = now_s - max(ended_s, self.since_s) >= grace_s
        return is_stuck or now_s - ended_s >= PATIENCE * grace_s


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
