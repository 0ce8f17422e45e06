"""Looks at the torch thread every now and then: reports where it stays at one thing, and ends a
process whose torch thread nobody can get back.

Runs on the event loop, which user code in another thread leaves free, unless it holds the
interpreter's lock: for that there is a timer that needs no Python (`faulthandler`). A plan that
takes long is reported to those who attend it, and goes on; decisions are in `host/stalls.py`.
"""

import asyncio
import faulthandler
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

import structlog

from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host.stalls import (
    StackFrame,
    StallCause,
    StallLimits,
    ThreadStay,
    cause_of,
    is_due_again,
)
from stratagem.worker.plans.plan_execution import PlanExecution
from stratagem.worker.service.session_table import Sessions
from stratagem.worker.session.context import Host
from stratagem.worker.user_code.bundle_import import plain_path

log = structlog.get_logger(__name__)

LONGEST_PAUSE_S: Final = 1.0
"""Between two looks."""
LOOKS: Final = 8
"""At least so many in each limit."""
HUNG: Final = 10
"""A process whose event loop does not run for so many times the limit ends itself."""
REARM_S: Final = 5.0
"""The timer of such a process begins anew this often at most."""
_EVENT_LOOP: Final = "MainThread"
_IDLE: Final = "concurrent.futures.thread"
"""The module in which threads of a pool wait for work."""


@dataclass(slots=True)
class Watchdog:
    """Watches the torch thread of this process. on_stuck: called once, with the reason."""

    host: Host
    sessions: Sessions
    limits: StallLimits
    on_stuck: Callable[[str], None]
    _owner: object = None
    _stay: ThreadStay = field(default_factory=lambda: ThreadStay(-1, 0.0))
    _told: list[PlanExecution] = field(default_factory=list)
    """The plans that have been told of the present stay."""
    _told_s: float = 0.0
    """How long it had lasted then."""
    _is_stuck: bool = False

    async def run(self) -> None:
        """Look until cancelled."""
        pause_s = min(LONGEST_PAUSE_S, min(self.limits.report_s, self.limits.grace_s) / LOOKS)
        loop, armed_s = asyncio.get_running_loop(), float("-inf")
        hung_s = HUNG * self.limits.report_s
        try:
            while True:
                now_s = loop.time()
                if now_s - armed_s >= min(REARM_S, hung_s / LOOKS):
                    # The proxy of sys.stderr passes its file descriptor on.
                    faulthandler.dump_traceback_later(hung_s, exit=True)
                    armed_s = now_s
                self.look(now_s)
                await asyncio.sleep(pause_s)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def look(self, now_s: float) -> None:
        """Look at the thread once."""
        thread = self.host.thread
        owner, before = thread.owner, self._stay
        if owner is not self._owner:
            self._owner, self._stay = owner, ThreadStay(thread.activity.num_moves, now_s)
        else:
            self._stay = before.seen(thread.activity.num_moves, now_s)
        if self._told_s and self._stay is not before:
            self._clear()
        if not thread.is_busy or self._is_stuck:
            return
        if self._must_end(now_s):
            self._end(now_s)
        elif self._stay.is_long(now_s, self.limits.report_s):
            self._report(now_s - self._stay.since_s)

    def _must_end(self, now_s: float) -> bool:
        """Return whether the thread has to be had back: its plan was ended, or nobody has attended
        it for a while and others wait."""
        owner = self._owner
        ended_s = owner.ended_s if isinstance(owner, PlanExecution) else None
        if ended_s is None and not self._is_in_the_way():
            return False
        return self._stay.is_hopeless(now_s, self.limits, ended_s=ended_s)

    def _is_in_the_way(self) -> bool:
        owner = self._owner
        if isinstance(owner, PlanExecution) and not owner.is_deserted:
            return False
        waiting = self.sessions.awaiting_thread()
        return any(plan.is_attended for plan in waiting if plan is not owner)

    def _end(self, now_s: float) -> None:
        self._is_stuck = True
        cause, seconds = self._cause(), now_s - self._stay.since_s
        if not self._told_s:
            self._log(cause, seconds)
        at = f" at {cause.place}" if cause.place else ""
        self.on_stuck(f"the torch thread has been in {self._activity()}{at} for {seconds:.0f} s")

    def _report(self, seconds: float) -> None:
        self.host.stats.stalled_s = seconds
        if not is_due_again(seconds, self._told_s):
            return
        cause = self._cause()
        if not self._told_s:
            self._log(cause, seconds)
        self._told_s = seconds
        activity = self._activity()
        own = pb.Stall(seconds=seconds, activity=activity, place=cause.place, awaits=cause.awaits)
        behind = pb.Stall(seconds=seconds, awaits="another plan that keeps its torch thread")
        self._told = list(self.sessions.awaiting_thread())
        for plan in self._told:
            plan.work.outbox.stall(own if plan is self._owner else behind)

    def _clear(self) -> None:
        """Take back what was said: the thread has moved on."""
        log.info("the torch thread has moved on", after_s=round(self._told_s))
        self.host.stats.stalled_s = 0.0
        for plan in self._told:
            plan.work.outbox.stall(pb.Stall())
        self._told, self._told_s = [], 0.0

    def _activity(self) -> str:
        """Return what the thread does, in words."""
        if text := self.host.thread.activity.text:
            return text
        if not isinstance(self._owner, PlanExecution):
            return "putting in order what an ended plan has left"
        outbox = self._owner.work.outbox
        return f"{outbox.activity} after step {outbox.step}" if outbox.step else outbox.activity

    def _cause(self) -> StallCause:
        others: list[str] = []
        if isinstance(self._owner, PlanExecution):
            view = self._owner.work.control.view
            me = self.host.worker_id
            others = [peer.worker_id for peer in view.members if peer.worker_id != me]
        return cause_of(_stack_of(self.host.thread.ident), others)

    def _log(self, cause: StallCause, seconds: float) -> None:
        """Write down where the threads are that run code of the job or of ours."""
        about = {}
        if isinstance(self._owner, PlanExecution):
            key = self._owner.work.key
            about = {"run_id": key.run_id, "party": key.party, "plan": self._owner.key.kind}
        log.warning(
            "the torch thread stays at one thing",
            activity=self._activity(),
            place=cause.place,
            awaits=cause.awaits,
            seconds=round(seconds, 1),
            stack="\n".join(_stacks(self.host.thread.ident)),
            **about,
        )


def _stack_of(ident: int) -> list[StackFrame]:
    """Return the frames of a thread, innermost first."""
    frame, found = sys._current_frames().get(ident), []
    while frame is not None:
        found.append(_told(frame))
        frame = frame.f_back
    return found


def _told(frame: FrameType) -> StackFrame:
    code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
    return StackFrame(module, plain_path(code.co_filename), frame.f_lineno, code.co_name)


def _stacks(ident: int) -> Iterator[str]:
    """Yield the stack of this thread, and of all others that do anything but run the event loop."""
    frames, names = sys._current_frames(), {each.ident: each.name for each in threading.enumerate()}
    for number in sorted(frames, key=lambda number: number != ident):
        name, frame = names.get(number, "unknown"), frames[number]
        if name != _EVENT_LOOP and frame.f_globals.get("__name__") != _IDLE:
            yield f"thread {name}:"
            yield "".join(traceback.format_stack(frame)).rstrip()
