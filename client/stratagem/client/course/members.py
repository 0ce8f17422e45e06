"""Derive from a run's events the times at which workers were members of its parties, the reasons
why they left, and the outages of the coordinator; put statuses into words."""

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from stratagem.client.course.views import (
    ENDS,
    Event,
    RunStatus,
    Worker,
    ended_by,
    is_of_verifier,
    party_of,
)
from stratagem.client.pictures.axes import duration

# ---- Members ----


@dataclass(frozen=True, slots=True)
class MemberInterval:
    """A time interval in which one worker process was a member of a party."""

    party: str
    worker_id: str
    incarnation: str
    rank: int
    """The rank of the member at the beginning of the interval."""
    began_s: float
    """The wall time at which the interval begins."""
    ended_s: float | None
    """The wall time at which the interval ends; None while the worker is a member."""
    ending: str
    """The reason why the membership ended, as a sentence; empty while it lasts."""
    is_lost: bool
    """The worker process died, or sent nothing for too long."""
    step: int | None = None
    """The number of steps that the run had done when the process died, if known."""


def members(events: Iterable[Event]) -> tuple[MemberInterval, ...]:
    """Return the membership intervals of all parties of a run, sorted by their beginning.

    An interval continues if the next membership has the same process.
    """
    folding = MembersFolding()
    for event in events:
        folding.fold(event)
    return folding.intervals


class MembersFolding:
    """An incremental reader of a run's events that builds membership intervals."""

    def __init__(self) -> None:
        self._ended: list[MemberInterval] = []
        self._open: dict[str, dict[tuple[str, str], MemberInterval]] = {}
        """The open intervals, keyed by party, then by (worker, incarnation)."""
        self._died: dict[tuple[str, str], Mapping[str, Any]] = {}

    @property
    def intervals(self) -> tuple[MemberInterval, ...]:
        """Return the intervals so far, sorted by their beginning."""
        intervals = (
            *self._ended,
            *(stay for of_one in self._open.values() for stay in of_one.values()),
        )
        return tuple(sorted(intervals, key=lambda stay: (stay.began_s, stay.party, stay.rank)))

    def fold(self, event: Event) -> None:
        """Process the next event of the run; workers that only verify it count as no members."""
        match event.kind:
            case _ if is_of_verifier(event):
                return
            case "ProcessDied":
                member = event.payload["member"]
                self._died[member["worker_id"], member["incarnation"]] = event.payload
            case "MembersFormed":
                party, now = party_of(event), _of_membership(event)
                before = self._open.get(party, {})
                self._end(
                    party, [key for key in before if key not in now], event, event.payload["reason"]
                )
                self._open[party] = {**before, **{k: v for k, v in now.items() if k not in before}}
            case kind if kind in ENDS:
                for party in list(self._open):
                    self._end(party, list(self._open[party]), event, event.sentence)

    def _end(self, party: str, keys: Iterable[tuple[str, str]], event: Event, reason: str) -> None:
        for key in keys:
            interval = self._open[party].pop(key)
            self._ended.append(_ended(interval, event.time_s, reason, self._died))


def _of_membership(event: Event) -> dict[tuple[str, str], MemberInterval]:
    party = party_of(event)
    return {
        (member["worker_id"], member["incarnation"]): MemberInterval(
            *(party, member["worker_id"], member["incarnation"], rank, event.time_s, None, ""),
            is_lost=False,
        )
        for rank, member in enumerate(event.payload["members"])
    }


def _ended(
    interval: MemberInterval,
    time_s: float,
    reason: str,
    died: Mapping[tuple[str, str], Mapping[str, Any]],
) -> MemberInterval:
    death = died.get((interval.worker_id, interval.incarnation))
    if death is None:
        is_lost = interval.worker_id in _lost(reason)
        return replace(interval, ended_s=time_s, ending=reason, is_lost=is_lost)
    how = ended_by(death.get("status"))
    text = f"its process ended: {how}" if how else "its process ended"
    step = death.get("step")
    return replace(interval, ended_s=time_s, ending=text, is_lost=True, step=step)


def _lost(reason: str) -> set[str]:
    """Parse the names of lost workers out of the reason of a membership change, such as "worker-0,
    worker-1 lost, worker-2 joined, 1 of 2 workers"."""
    lost: set[str] = set()
    named: list[str] = []
    for part in reason.split(", "):
        name, _, how = part.partition(" ")
        named.append(name)
        if how == "lost":
            lost.update(named)
        if how:
            named = []
    return lost


# ---- Failed runs ----
#
# The progress of a failed run is described in the same words everywhere.

_STEP: Final = re.compile(r"training step (\d{1,18})")


def failed_step(activity: str) -> int | None:
    """Return the step that the description of a failed activity names; None if it names none."""
    match = _STEP.search(activity)
    return int(match[1]) if match else None


def failure_text(committed: int, activity: str = "", reached: int = 0, of: int = 0) -> str:
    """Return a text such as "committed to step 40 of 100; failed in step 47".

    committed: the step of the newest commit. activity: the journaled description of what failed.
    reached: the newest step that was reported, if known. of: the number of steps of the whole run.
    """
    steps = f"{committed:,} of {of:,}" if of else f"{committed:,}"
    begin = f"committed to step {steps}" if committed else "no step committed"
    step = failed_step(activity)
    if step is not None:
        return f"{begin}; failed in step {step:,}"
    return f"{begin}; failed after step {reached:,}" if reached > committed else begin


# ---- Statuses in words ----

_UNITS: Final[Mapping[str, str]] = {
    "Federated": "rounds",
    "PopulationBased": "generations",
    "Custom": "steps of the strategy",
}
"""The unit of progress for strategy types that do not count steps."""


def committed_step(status: RunStatus) -> int:
    """Return the step of the newest commit, 0 if there is none."""
    return max((commit.step for commit in status.commits if commit.member is None), default=0)


def progress_text(status: RunStatus) -> str:
    """Format a run's progress, such as "12 of 30 rounds"; "" if it is unknown."""
    unit = _UNITS.get((status.job.get("strategy") or {}).get("type", ""), "steps")
    if status.phase == "FAILED" and unit == "steps":
        activity = status.error.activity if status.error is not None else ""
        return failure_text(committed_step(status), activity, of=status.num_steps)
    return f"{status.step:,} of {status.num_steps:,} {unit}" if status.num_steps else ""


def worker_state(worker: Worker) -> str:
    """Format the state of a worker, such as "alive", "quarantined, alive" or "lost, silent for
    12 s"."""
    state = "alive" if worker.is_alive else f"lost, silent for {duration(worker.silent_s)}"
    return f"quarantined, {state}" if worker.quarantine else state


def time_text(time_s: float) -> str:
    """Format a time as "2026-11-23 08:15:00 UTC", independent of the reader's time zone."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# ---- Outages ----
#
# The coordinator of a run was away if it had crashed, was restarted, or stood still.
#
# Events have two times: the wall time, and the leader's clock, which advances only while a
# coordinator leads and runs, and which begins again, after a crash, at the last journaled time.
# The amount that the wall clock has gained on it from one event to the next is the time without a
# leader. The outage may begin as early as the earlier event, so this is its greatest length.

MIN_AWAY_S: Final = 2.0
"""The shortest outage to report: a busy machine may stall for a shorter time."""
MAX_OUTAGES: Final = 1000
"""The largest number of outages to keep; older ones are dropped."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A time interval without a leading coordinator; began_s is the earliest possible beginning."""

    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        """Return the longest possible duration of the outage."""
        return self.ended_s - self.began_s


class OutagesFolding:
    """An incremental reader of a run's events that detects coordinator outages."""

    def __init__(self) -> None:
        self.outages: deque[Outage] = deque(maxlen=MAX_OUTAGES)
        self._before: Event | None = None

    def fold(self, event: Event) -> Outage | None:
        """Process the next event; return the outage since the event before it, if there was one."""
        before, self._before = self._before, event
        if before is None or before.kind in ENDS:
            return None  # an ended run needs no leader
        led_from_s, led_to_s = before.leader_s, event.leader_s
        if not led_from_s or not led_to_s:
            return None  # older versions do not report it
        away_s = (event.time_s - before.time_s) - max(led_to_s - led_from_s, 0.0)
        if away_s < MIN_AWAY_S:
            return None
        outage = Outage(before.time_s, before.time_s + away_s)
        self.outages.append(outage)
        return outage
