"""Events, holders and clocks for the tests of the journal."""

import pytest

from stratagem.common.base.ids import RunId
from stratagem.coordinator.store.journal import Journal, Record, StoredRecord
from stratagem.coordinator.store.lead import Holder, Lease

A, B = RunId("a-1"), RunId("b-2")
US = Holder.of_this_process("us")
ELSEWHERE = Holder("they", "another host", 1, 1)
OVER_BOTH = ["sqlite", pytest.param("postgres", marks=pytest.mark.sweep)]
"""Databases, for what is proved of both in make test by the contract of journals."""


def record(run_id: RunId, seq: int, key: str | None = None, time_s: float = 0.0) -> Record:
    return Record(run_id, seq, "StepDone", 1, f'{{"seq":{seq}}}', time_s, 1e9 + seq, key)


def events(log: Journal) -> list[StoredRecord]:
    """All there are, in the order in which they were appended."""
    found = [each for run_id in log.briefs("") for each in log.read(run_id)]
    return sorted(found, key=lambda each: each.position)


def lead(log: Journal, holder: Holder = US) -> int:
    """Take a lead that is free."""

    def refuse(_seen: Lease) -> None:
        raise AssertionError("it is not free")

    return log.take_lead(holder, ttl_s=10, on_wait=refuse).term


class FakeTime:
    """A monotonic clock that a sleep moves; `jumps` are added to single sleeps."""

    def __init__(self, *jumps: float) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []
        self.jumps = list(jumps)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.now_s += duration_s + (self.jumps.pop(0) if self.jumps else 0)
