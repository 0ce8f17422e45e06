"""The workers of a run: when each was a member of which party, and why it was one no longer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stratagem.client.course.payloads import ENDS, ended_by, party_of
from stratagem.client.course.shapes import EventLike


@dataclass(frozen=True, slots=True)
class MemberInterval:
    """A stretch of time in which one process of a worker was a member of a party."""

    party: str
    worker_id: str
    incarnation: str
    rank: int
    """In the first membership of the interval."""
    began_s: float
    """Wall time."""
    ended_s: float | None
    """None: it is a member now."""
    ending: str
    """Why it ended, as a sentence; empty while it has not."""
    is_lost: bool
    """The process has ended unasked, or was silent for too long."""
    step: int | None = None
    """Of a process that died: how many steps it had applied, if that is known."""


def members(events: Iterable[EventLike]) -> tuple[MemberInterval, ...]:
    """Return the intervals of membership of all parties of a run, in order of their beginning.

    An interval goes on where the next membership has the same process.
    """
    folding = MembersFolding()
    for event in events:
        folding.fold(event)
    return folding.intervals


class MembersFolding:
    """Who was a member when, while the events of a run are read."""

    def __init__(self) -> None:
        self._ended: list[MemberInterval] = []
        self._open: dict[str, dict[tuple[str, str], MemberInterval]] = {}
        """By party, then by worker and incarnation."""
        self._died: dict[tuple[str, str], Mapping[str, Any]] = {}

    @property
    def intervals(self) -> tuple[MemberInterval, ...]:
        """Return the intervals so far, in order of their beginning."""
        found = (
            *self._ended,
            *(each for of_one in self._open.values() for each in of_one.values()),
        )
        return tuple(sorted(found, key=lambda each: (each.began_s, each.party, each.rank)))

    def fold(self, event: EventLike) -> None:
        """Take the next event of the run."""
        match event.kind:
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

    def _end(
        self, party: str, keys: Iterable[tuple[str, str]], event: EventLike, reason: str
    ) -> None:
        for key in keys:
            interval = self._open[party].pop(key)
            self._ended.append(_ended(interval, event.time_s, reason, self._died))


def _of_membership(event: EventLike) -> dict[tuple[str, str], MemberInterval]:
    party = party_of(event)
    return {
        (each["worker_id"], each["incarnation"]): MemberInterval(
            *(party, each["worker_id"], each["incarnation"], rank, event.time_s, None, ""),
            is_lost=False,
        )
        for rank, each in enumerate(event.payload["members"])
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
    """Return the workers that a membership names as lost: "worker-0, worker-1 lost, worker-2
    joined, 1 of 2 workers"."""
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
