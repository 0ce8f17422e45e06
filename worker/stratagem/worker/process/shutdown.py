"""Handling of the signals that ask a worker to end.

Schedulers repeat themselves: at the end of a job's time Slurm sends SIGTERM to the step and, at
once, to the job. So a repeat that follows closely means nothing. One that comes later, or a second
Ctrl-C, ends the process at once.
"""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import Final

import structlog

from stratagem.common.process.process import MISTAKEN, PREEMPTED

REPEAT_S: Final = 2.0
"""Signals that follow the first one within this are repeats of it."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Stop:
    """The request to end this process: whether it has come, and by which signal."""

    reason: str = ""
    is_release: bool = False
    """True where the work is done, and no signal came before."""
    is_mistaken: bool = False
    """True where there is nothing that this process could be for: a person has to look at it."""
    is_replacement: bool = False
    """True where this process can compute no more and another one is to take its place."""
    is_stuck: bool = False
    """True where nothing that runs here will ever end."""
    cause: str = ""
    """What that is, for the log of this process alone."""
    told: asyncio.Event = field(default_factory=asyncio.Event)
    _first_s: float | None = None

    def release(self, reason: str) -> None:
        """Take in that this process is not needed any more."""
        if not self.told.is_set():
            self.reason, self.is_release = reason, True
            self.told.set()

    def refuse(self, reason: str) -> None:
        """Take in that this process was started for something that is not there."""
        if not self.told.is_set():
            self.reason, self.is_mistaken = reason, True
            self.told.set()

    def replace(self, reason: str) -> None:
        """Take in that another process has to take the place of this one."""
        self.is_replacement = True
        if not self.told.is_set():
            self.reason = reason
            self.told.set()

    def give_up(self, cause: str) -> None:
        """Take in that the torch thread does not come back: as `replace`, but nothing is waited
        for. Who is to end already does so without it, with the status of before."""
        if not self.told.is_set():
            self.is_stuck, self.cause = True, cause
            self.replace("the torch thread was lost")

    def note(self, number: signal.Signals, now_s: float) -> bool:
        """Take in a signal; True when the process has to end at once."""
        if self._first_s is None:
            self._first_s = now_s
            if not self.told.is_set():
                self.reason = number.name
                self.told.set()
            return False
        return number is signal.SIGINT or now_s - self._first_s > REPEAT_S

    @property
    def is_preemption(self) -> bool:
        """True when a scheduler, and not a person, has ended a process that was still wanted."""
        is_done = self.is_release or self.is_replacement or self.is_mistaken
        return self.told.is_set() and not is_done and self.reason != signal.SIGINT.name

    def status(self, is_launched: bool) -> int:
        """Return the exit status. Whatever starts a process again does so for those that are not 0;
        launchers do for PREEMPTED, and none takes MISTAKEN for work that is done."""
        if self.is_mistaken:
            return MISTAKEN
        if is_launched and (self.is_preemption or self.is_replacement):
            return PREEMPTED
        return 1 if self.is_replacement else 0


def stop_by_signals(preempt_signal: str) -> Stop:
    """Return a Stop that SIGTERM, SIGINT and the signal of this name, if any, set from now on."""
    stop, loop = Stop(), asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.note(number, loop.time()):
            _log.warning("second signal: exiting at once", signal=number.name)
            sys.stderr.flush()
            os._exit(1)

    numbers = {signal.SIGTERM, signal.SIGINT}
    if preempt_signal:
        numbers.add(signal.Signals[f"SIG{preempt_signal}"])
    if signal.SIGUSR1 not in numbers:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as __main__ did not know yet
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    return stop
