"""Distinguish work that ends its own process from processes that others end: one rule for all
strategies.

Any process may be killed at any time, and that is no fault of the job. What counts is the same work
(a segment, a client's round, a build, an evaluation) that loses process after process and comes no
further:

* a process that was stopped (by a signal that asks for it, a drain, its supervisor), or that did
  something else, does not count: no ProcessDied is journaled for it
* processes that were at the work together and end one after the other count as one death, so that
  all workers killed at once are one
* work that comes further than ever before has its whole budget again
* OWN deaths are enough where the process ended by itself: it exited, or the processor refused what
  it did. SIGKILL, and an unobserved end, can be the operator's, the kernel's for want of
  memory, or the job's: those it takes UNEXPLAINED of, over UNEXPLAINED_S, which random kills do not
  reach while the work comes further now and then
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from signal import Signals
from typing import Final

from stratagem.coordinator.core.facts import Member, ProcessDied

OWN: Final = 3
UNEXPLAINED: Final = 10
UNEXPLAINED_S: Final = 30.0
FAULTS: Final = frozenset(
    {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP", "SIGPIPE", "SIGXFSZ"}
)
"""Signals that a process causes by what it does itself."""
REQUESTS: Final = frozenset(
    {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGPWR", "SIGXCPU", "SIGALRM"}
)
"""Signals that are sent to a process from outside to make it end."""


@dataclass(frozen=True, slots=True)
class Deaths:
    """The processes that one piece of work has ended since it last came further."""

    num_own: int = 0
    num_unexplained: int = 0
    furthest: int = -1
    """The highest step that a process is known to have reached before it ended."""
    present: frozenset[Member] = frozenset()
    """The members at the work when the newest death was counted; their deaths count with it."""
    latest: ProcessDied | None = None
    """The newest death that counts."""
    since_s: float = 0.0
    """Leader-clock time at which the first counted death was journaled."""
    latest_s: float = 0.0
    """Leader-clock time at which the newest counted death was journaled."""

    @property
    def num(self) -> int:
        return self.num_own + self.num_unexplained

    @property
    def are_too_many(self) -> bool:
        """True when trying the work once more is hopeless."""
        is_long = self.latest_s - self.since_s >= UNEXPLAINED_S
        return self.num_own >= OWN or (self.num >= UNEXPLAINED and is_long)


def after(deaths: Deaths, died: ProcessDied, now_s: float, at_work: Iterable[Member]) -> Deaths:
    """Count one more process that has ended; at_work: the members that do the work now, or did and
    were lost."""
    if died.step is not None and died.step > deaths.furthest:
        deaths = Deaths(furthest=died.step)
    if died.member in deaths.present:
        return deaths
    is_own = ended_by_itself(died.status)
    return replace(
        deaths,
        num_own=deaths.num_own + is_own,
        num_unexplained=deaths.num_unexplained + (not is_own),
        present=frozenset({died.member, *at_work}),
        latest=died,
        since_s=deaths.since_s if deaths.num else now_s,
        latest_s=now_s,
    )


def ended_by_itself(status: int | None) -> bool:
    """Return True when an exit status (negative: the signal's number) is of the process's own
    making."""
    return status is not None and (status > 0 or _signal(-status) in FAULTS)


def was_asked_to_end(status: int | None) -> bool:
    """Return True when an exit status is that of a process ended by a signal that asks it to
    end."""
    return status is not None and status < 0 and _signal(-status) in REQUESTS


def why(work: str, deaths: Deaths) -> str:
    """Return the sentence about work that has ended too many processes."""
    text = f"{work} has ended {deaths.num} worker processes"
    if deaths.furthest >= 0:
        text += f" and came no further than step {deaths.furthest}"
    died = deaths.latest
    assert died is not None, "nobody asks of work that has ended none"
    text += f"; the last one, {died.member.worker_id}, ended{how(died.status) or ' unseen'}"
    return f"{text} and had printed: {' | '.join(died.lines)}" if died.lines else text


def how(status: int | None) -> str:
    """Return how a process ended, as " by SIGKILL" or " with exit status 3"; "" when not
    observed."""
    if status is None:
        return ""
    return f" by {_signal(-status)}" if status < 0 else f" with exit status {status}"


def _signal(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
