"""The workers as strategies see them when they decide, and the phases of a run."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from stratagem.common.base.ids import WorkerId
from stratagem.common.numerics import rules
from stratagem.coordinator.core.facts import Capability, Member


class RunPhase(StrEnum):
    PENDING = "PENDING"
    PLACING = "PLACING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        return self in (RunPhase.COMPLETED, RunPhase.FAILED, RunPhase.CANCELLED)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as it last registered; is_alive is False once its lease has expired, or once a
    worker has left of which a quarantine or a mark is remembered."""

    member: Member
    address: str
    capability: Capability
    is_alive: bool = True
    is_draining: bool = False
    reason: str = ""
    is_blameless: bool = False
    """True if the worker was lost before it had begun the work it was given."""
    lost_s: float = 0.0
    """Leader-clock time at which the worker was lost; 0 while it is alive."""
    beat_s: float = 0.0
    """Leader-clock time of a lost worker's last heartbeat, or of its loss if silence was not the
    reason; 0 while it is alive."""
    registered_s: float = 0.0
    """Leader-clock time of the worker's last registration."""
    quarantine: str = ""
    """The reason for which the worker gets no work until it is released; "" if there is none."""
    marked_s: float = 0.0
    """Leader-clock time of the newest mark, see WorkerMarked; 0 without one."""

    @property
    def is_usable(self) -> bool:
        return self.is_alive and not self.is_draining and not self.quarantine

    @property
    def has_left(self) -> bool:
        """Return True if the worker has ended as it was asked to, and is not lost."""
        return self.is_draining and not self.is_alive

    @property
    def is_listed(self) -> bool:
        """Return False if the worker has left, and is remembered only for an earlier mark."""
        return bool(self.quarantine) or not self.has_left


@dataclass(frozen=True)
class World:
    """The state outside its run that a strategy may read to decide: the workers and their load."""

    workers: Mapping[WorkerId, WorkerRecord]
    load: Mapping[WorkerId, int]
    """The number of active runs that have each worker as a member."""
    found: dict[Hashable, tuple[WorkerRecord, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Cached results of placement, keyed by what was required of the workers: every fact asks
    again, and there are thousands of workers."""
    numerics: int = 0
    """Version of the numerics rules that the run follows; 0 if the world is not seen by a run."""
    _under: dict[int, "World"] = field(default_factory=dict, repr=False, compare=False)
    _sorted: list[tuple[WorkerRecord, ...]] = field(default_factory=list, repr=False, compare=False)
    """The usable workers, once they are sorted. Worlds made by `under` share this list and have no
    reference to their origin: otherwise each change would leave a cycle of thousands of workers to
    the garbage collector."""

    def under(self, numerics: int) -> "World":
        """Return the world as seen by a run that follows this version of the numerics rules."""
        if numerics not in self._under:
            self._under[numerics] = replace(self, numerics=numerics, found={}, _under={})
        return self._under[numerics]

    def usable(self) -> list[WorkerRecord]:
        """Return the usable workers that know the run's numerics rules, sorted by load, then by
        name."""
        return list(self._current)

    def outdated(self) -> list[WorkerRecord]:
        """Return the workers that would be usable if they knew the run's numerics rules."""
        return [record for record in self._usable if not self._is_current(record)]

    def _is_current(self, record: WorkerRecord) -> bool:
        return rules.knows(record.capability.numerics_rules, self.numerics)

    @cached_property
    def _current(self) -> tuple[WorkerRecord, ...]:
        return tuple(record for record in self._usable if self._is_current(record))

    @property
    def _usable(self) -> tuple[WorkerRecord, ...]:
        """Return the usable workers, sorted once for all runs that ask."""
        if not self._sorted:
            usable = [record for record in self.workers.values() if record.is_usable]
            usable.sort(key=lambda w: (self.load.get(w.member.worker_id, 0), w.member.worker_id))
            self._sorted.append(tuple(usable))
        return self._sorted[0]

    def holds(self, member: Member) -> bool:
        """Return True if this very process of the worker is usable."""
        record = self.workers.get(member.worker_id)
        return record is not None and record.member == member and record.is_usable
