"""Watch the torch thread: report long stays at one activity, and end a process whose torch thread
cannot be freed while others wait for it.

The watchdog runs on the event loop, which user code in another thread leaves free, unless it holds
the interpreter's lock. For that case a timer that needs no Python (`faulthandler`) writes the
stacks; it ends nothing, as it also fires after a pause of the whole process. A long plan is
reported to its followers, and continues; decisions are in `host/stalls.py`.
"""

import asyncio
import faulthandler
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

import structlog

from stratagem.common.base.text import printable
from stratagem.v1 import worker_pb2 as pb
from stratagem.worker.host.stalls import (
    StackFrame,
    StallCause,
    StallLimits,
    ThreadStay,
    cause_of,
    counted_s,
    is_compiling,
    is_due_again,
)
from stratagem.worker.plans.execution import PlanExecution
from stratagem.worker.service.sessions import Sessions
from stratagem.worker.session.context import Host
from stratagem.worker.user_code.bundles import plain_path

log = structlog.get_logger(__name__)

LONGEST_PAUSE_S: Final = 1.0
"""Maximum pause between two checks."""
LOOKS: Final = 8
"""Minimum number of checks within each limit."""
HUNG: Final = 10
"""The stacks are written if the event loop stands still for this multiple of the limit."""
REARM_S: Final = 5.0
"""Minimum seconds between two restarts of the timer that writes the stacks."""
_EVENT_LOOP: Final = "MainThread"
_IDLE: Final = "concurrent.futures.thread"
"""The module in which idle threads of a pool wait."""


@dataclass(slots=True)
class Watchdog:
    """Watches this process's torch thread. on_stuck: called once, with the reason."""

    host: Host
    sessions: Sessions
    limits: StallLimits
    on_stuck: Callable[[str], None]
    _owner: object = None
    _stay: ThreadStay = field(default_factory=lambda: ThreadStay(-1, 0.0))
    _run_id: str = ""
    """The run whose plan had the thread last."""
    _num_steps: int = 0
    """Number of this worker's steps when that run, `_run_id`, got the thread."""
    _wanted_s: float | None = None
    """Time since which others wait for the thread, whose work is not needed; None if none do."""
    _reported: list[PlanExecution] = field(default_factory=list)
    """The plans that have got a report of the thread's present stay at one activity."""
    _told_s: float = 0.0
    """Duration of the thread's present stay at one activity when it was last reported."""
    _is_stuck: bool = False
    _has_failed: bool = False

    async def run(self) -> None:
        """Check the thread at intervals, until cancelled."""
        pause_s = min(LONGEST_PAUSE_S, min(self.limits.report_s, self.limits.grace_s) / LOOKS)
        loop, armed_s = asyncio.get_running_loop(), float("-inf")
        looked_s, watched_s = loop.time(), 0.0
        hung_s = HUNG * self.limits.report_s
        try:
            while True:
                now_s = loop.time()
                if now_s - armed_s >= min(REARM_S, hung_s / LOOKS):
                    write_stacks_in(hung_s)
                    armed_s = now_s
                watched_s += counted_s(now_s - looked_s, pause_s)
                looked_s = now_s
                self._try_to_look(watched_s)
                await asyncio.sleep(pause_s)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _try_to_look(self, now_s: float) -> None:
        """Check the thread; log errors, since a bug or odd user code must not end the process."""
        try:
            self.look(now_s)
        except Exception as error:  # the supervisor of the torch thread: it looks again
            if not self._has_failed:
                self._has_failed = True
                log.error("the torch thread cannot be watched", exc_info=error)

    def look(self, now_s: float) -> None:
        """Check the thread once: report a long stay, or end the process if the thread is stuck."""
        thread = self.host.thread
        owner, before = thread.owner, self._stay
        num_moves = thread.activity.num_moves
        if owner is self._owner:
            self._stay = before.seen(num_moves, now_s)
        else:
            longest_s = self._take_over(owner, now_s)
            self._stay = ThreadStay(num_moves, now_s, longest_s)
        if self._told_s and self._stay is not before:
            self._clear()
        is_wanted = thread.is_busy and self._is_in_the_way()
        if not is_wanted:
            self._wanted_s = None
        elif self._wanted_s is None:
            self._wanted_s = now_s
        if not thread.is_busy or self._is_stuck:
            return
        if self._must_end(now_s):
            self._end(now_s)
        elif self._waited_s(now_s) or self._stay.is_long(now_s, self.limits.report_s):
            self._report(now_s)

    def _take_over(self, owner: object, now_s: float) -> float:
        """Note that another plan has the thread; return the longest stay of its run so far."""
        before, self._owner, self._wanted_s = self._owner, owner, None
        if isinstance(owner, PlanExecution) and owner.work.key.run_id != self._run_id:
            self._run_id, self._num_steps = owner.work.key.run_id, self.host.stats.num_steps
            return 0.0
        # Idle time and clean-up of the thread say nothing about the pace of a run.
        is_plans = isinstance(before, PlanExecution)
        return (self._stay.seen(-1, now_s) if is_plans else self._stay).longest_s

    def _must_end(self, now_s: float) -> bool:
        """Return whether the process must end, since the thread is needed and will not return."""
        wanted_s, limits = self._wanted_s, self.limits
        if wanted_s is None or not self._stay.is_hopeless(now_s, limits.grace_s, wanted_s=wanted_s):
            return False
        patience_s = limits.patience_s(
            is_run_over=not self.sessions.holds_run(self._run_id),
            has_stepped=self.host.stats.num_steps > self._num_steps,
            is_compiling=any(
                is_compiling(_frames(frame)) for frame in sys._current_frames().values()
            ),
        )
        return self._stay.is_hopeless(now_s, patience_s, wanted_s=wanted_s)

    def _is_in_the_way(self) -> bool:
        """Return whether others wait for the thread although its plan was ended or is deserted."""
        owner = self._owner
        if isinstance(owner, PlanExecution) and not (owner.is_ended or owner.is_deserted):
            return False
        waiting = self.sessions.awaiting_thread()
        return any(plan.is_attended and not plan.is_ended for plan in waiting if plan is not owner)

    def _waited_s(self, now_s: float) -> float:
        """Return how long others have waited for the thread, if its work is not needed; else 0."""
        wanted_s, while_s = self._wanted_s, self.limits.grace_s / LOOKS
        if wanted_s is None or not self._stay.is_hopeless(now_s, while_s, wanted_s=wanted_s):
            return 0.0
        return now_s - wanted_s

    def _end(self, now_s: float) -> None:
        self._is_stuck = True
        cause, seconds = self._cause(), now_s - self._stay.since_s
        at = f" at {cause.place}" if cause.place else ""
        self.on_stuck(f"the torch thread has been in {self._activity()}{at} for {seconds:.0f} s")
        if not self._told_s:
            self._log(cause, seconds)

    def _report(self, now_s: float) -> None:
        """Report the stay at intervals to plans that have or await the thread, and to new ones."""
        seconds = self.host.stats.stalled_s = now_s - self._stay.since_s
        plans, is_again = list(self.sessions.awaiting_thread()), is_due_again(seconds, self._told_s)
        waited_s = self._waited_s(now_s)
        late = [plan for plan in plans if plan not in self._reported] if waited_s else []
        due = plans if is_again else late
        if not due:
            return
        cause, activity, is_new = self._cause(), self._activity(), not self._told_s
        if is_again:
            self._reported, self._told_s = [], seconds
        stall = pb.Stall(seconds=seconds, activity=activity, place=cause.place, awaits=cause.awaits)
        behind_s = waited_s or seconds
        for plan in due:
            plan.work.outbox.stall(
                stall if plan is self._owner else self._behind(plan, stall, behind_s)
            )
        self._reported += due
        if is_new:
            self._log(cause, seconds)

    def _behind(self, plan: PlanExecution, stall: pb.Stall, seconds: float) -> pb.Stall:
        """Return the report for a plan that waits for the thread. It names the plan in the thread
        only to the same submitter."""
        owner, awaits = self._owner, "another plan that keeps its torch thread"
        if isinstance(owner, PlanExecution) and owner.work.admission is None:
            work = owner.work
            if work.request.submitted_by == plan.work.request.submitted_by:
                place = f" ({stall.place})" if stall.place else ""
                at = f"{stall.activity}{place}"
                awaits = f"its torch thread: run {work.key.run_id} is still at {at}"
        return pb.Stall(seconds=seconds, awaits=awaits)

    def _clear(self) -> None:
        """Withdraw the reports, since the thread has moved on."""
        log.info("the torch thread has moved on", after_s=round(self._told_s))
        self.host.stats.stalled_s = 0.0
        for plan in self._reported:
            plan.work.outbox.stall(pb.Stall())
        self._reported, self._told_s = [], 0.0

    def _activity(self) -> str:
        """Return a text about what the thread is doing."""
        text = self.host.thread.activity.text
        if not text and isinstance(self._owner, PlanExecution):
            outbox = self._owner.work.outbox
            text = f"{outbox.activity} after step {outbox.step}" if outbox.step else outbox.activity
        text = text or "putting in order what an ended plan has left"
        return printable(text, is_line=True)

    def _cause(self) -> StallCause:
        others: list[str] = []
        if isinstance(self._owner, PlanExecution):
            view = self._owner.work.control.view
            me = self.host.worker_id
            others = [peer.worker_id for peer in view.members if peer.worker_id != me]
        cause = cause_of(_frames(sys._current_frames().get(self.host.thread.ident)), others)
        return StallCause(printable(cause.place, is_line=True), cause.awaits)

    def _log(self, cause: StallCause, seconds: float) -> None:
        """Log the position of each thread that runs code of the job or of Stratagem."""
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
            stack=printable("\n".join(_stacks(self.host.thread.ident))),
            **about,
        )


def write_stacks_in(seconds: float) -> None:
    """Write the stacks of all threads to standard error after this time, unless called again
    before. Does nothing without a standard error file."""
    with suppress(RuntimeError, AttributeError, OSError, ValueError):
        # The proxy of sys.stderr passes its file descriptor on.
        faulthandler.dump_traceback_later(seconds, exit=False)


def _frames(frame: FrameType | None) -> list[StackFrame]:
    """Return the frames of a thread, innermost first."""
    frames = []
    while frame is not None:
        frames.append(_stack_frame(frame))
        frame = frame.f_back
    return frames


def _stack_frame(frame: FrameType) -> StackFrame:
    code, module = frame.f_code, dict.get(frame.f_globals, "__name__")
    name = module if isinstance(module, str) else ""
    return StackFrame(name, plain_path(code.co_filename), frame.f_lineno or 0, code.co_name)


def _stacks(ident: int) -> Iterator[str]:
    """Yield the stacks of this thread and all others, except idle ones and the event loop's."""
    frames, names = sys._current_frames(), {t.ident: t.name for t in threading.enumerate()}
    for number in sorted(frames, key=lambda number: number != ident):
        name, frame = names.get(number, "unknown"), frames[number]
        if name != _EVENT_LOOP and frame.f_globals.get("__name__") != _IDLE:
            yield f"thread {name}:"
            yield "".join(traceback.format_stack(frame)).rstrip()
