"""Decide who is wrong when a segment that was executed again ends with another state.

The second execution differs, so others follow until two agree. After that, each worker that is
suspected executes the segment alone: whoever computes other bits again is wrong for good, and a
fault that does not recur leaves a mark. All this is a pure function of the executions' digests.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from stratagem.common.base.ids import Digest, WorkerId
from stratagem.common.numerics.verification import Conclusion
from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import WorkerMarked, WorkerQuarantined
from stratagem.coordinator.core.world import WorkerRecord

MARK_S: Final = 24 * 3600.0
"""Seconds for which a mark counts: a worker that is then the only suspect is quarantined."""

MAX_EXECUTIONS: Final = 5
"""The most further executions of a segment by which it is decided who is wrong."""

Workers = frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class Point:
    """A state that the run has committed, and the workers that computed it from the one before."""

    base: Base
    digest: Digest
    """The digest that another execution has to end with, of all that the run goes on from."""
    value: Any = None
    """The run value of the run's own party at that commit, from which it can be trained again."""
    workers: Workers = frozenset()

    @property
    def segment(self) -> int:
        return self.base.segment


@dataclass(frozen=True, slots=True)
class Execution:
    """One more execution of a segment: the state that it ended with, and its workers."""

    digest: Digest
    workers: Workers


@dataclass(frozen=True, slots=True)
class Check:
    """The verification of consecutive states of a run, beginning with a state that is trusted."""

    base: Point
    points: tuple[Point, ...]
    """The states to compare, in order; those that were equal are dropped."""
    executions: tuple[Execution, ...] = ()
    """All executions of the first point, once the first of them differs from it."""
    differed_s: float = 0.0
    """Leader-clock time at which that execution had ended."""
    is_given_up: bool = False
    """True once an execution that was to decide has failed: no other one follows."""

    @property
    def conclusion(self) -> Conclusion | None:
        """Return who is wrong; None while that is not decided."""
        return self._decision[0]

    @property
    def undecided(self) -> Conclusion:
        """Return the conclusion if nobody else can execute the segment: the job does not repeat
        itself if three executions have three results."""
        digests = [self.points[0].digest, *(other.digest for other in self.executions)]
        is_of_job = len(digests) > 2 and len({*digests}) == len(digests)
        return Conclusion.JOB if is_of_job else Conclusion.OPEN

    @property
    def tried(self) -> Workers:
        """Return the workers that have executed the segment again."""
        return frozenset[WorkerId]().union(*(other.workers for other in self.executions))

    @property
    def _decision(self) -> tuple[Conclusion | None, int]:
        """Return the conclusion, and the number of executions that it follows from.

        Two equal results decide. An execution by the run's own workers does not confirm the run:
        what a defect repeats, it would repeat there. Two by different workers do.
        """
        point, seen = self.points[0], list[Execution]()
        for number, last in enumerate(self.executions, start=1):
            seen.append(last)
            equal = [other for other in seen if other.digest == last.digest]
            is_seconded = any(not other.workers & last.workers for other in equal)
            if last.digest == point.digest:
                if is_seconded or not last.workers & point.workers:
                    return Conclusion.VERIFIER, number
            elif len(equal) > 1:
                return Conclusion.RUN, number
            if number == MAX_EXECUTIONS:
                return self.undecided, number
        return self.undecided if self.is_given_up else None, len(self.executions)

    @property
    def right(self) -> Digest | None:
        """Return the digest that two executions agree on; None if there is none."""
        conclusion, number = self._decision
        match conclusion:
            case Conclusion.RUN:
                return self.executions[number - 1].digest
            case Conclusion.VERIFIER:
                return self.points[0].digest
            case _:
                return None

    @property
    def suspects(self) -> Workers:
        """Return the workers among which somebody was wrong; none while that is not decided."""
        conclusion, number = self._decision
        if conclusion is None or conclusion is Conclusion.JOB:
            return frozenset()
        if conclusion is Conclusion.OPEN:
            return self.points[0].workers | self.executions[0].workers
        return frozenset[WorkerId]().union(*self._wrong(number))

    @property
    def unprobed(self) -> tuple[WorkerId, ...]:
        """Return the suspects that have yet to execute the segment alone, sorted; none if there is
        no majority to compare them with."""
        if self.right is None or self.is_given_up:
            return ()
        return tuple(sorted(self.suspects - self._right_alone - self.wrong))

    @property
    def wrong(self) -> Workers:
        """Return the suspects that have computed other bits twice, one time of it alone."""
        if self.right is None:
            return frozenset()
        wrong = [*self._wrong(len(self.executions))]
        alone = frozenset[WorkerId]().union(*(names for names in wrong if len(names) == 1))
        return frozenset(name for name in alone if sum(name in names for names in wrong) > 1)

    @property
    def are_cleared(self) -> bool:
        """Return True if all suspects have computed the right bits alone."""
        return self.suspects <= self._right_alone

    @property
    def _right_alone(self) -> Workers:
        right = (other.workers for other in self.executions if other.digest == self.right)
        return frozenset[WorkerId]().union(*(names for names in right if len(names) == 1))

    def _wrong(self, number: int) -> Iterator[Workers]:
        """Yield the workers of each wrong execution, of the run's and the first `number` others."""
        if self.points[0].digest != self.right:
            yield self.points[0].workers
        yield from (
            other.workers for other in self.executions[:number] if other.digest != self.right
        )


@dataclass(frozen=True, slots=True)
class Blame:
    """The workers that have to be punished, and the time of what they did."""

    wrong: Workers
    """Those that computed other bits twice: they are quarantined at once."""
    marked: Workers
    """Those of which one may have been wrong once. Several are never quarantined for it: most of
    them are innocent."""
    since_s: float
    reason: str


def reason_of(segment: int) -> str:
    """Return the reason of a penalty, as a phrase about the worker."""
    return f"computed another state of segment {segment} than others"


def blame_of(check: Check, workers: Mapping[WorkerId, WorkerRecord]) -> Blame:
    """Return who has to be punished after a check; all suspects get a mark, if nobody has been
    wrong again. One that another run has had quarantined meanwhile has been, and clears the others.
    """
    quarantined = (name for name in check.suspects if name in workers and workers[name].quarantine)
    wrong = check.wrong | frozenset(quarantined)
    marked = frozenset[WorkerId]() if wrong else check.suspects
    return Blame(wrong, marked, check.differed_s, reason_of(check.points[0].segment))


def penalties(
    blame: Blame, workers: Mapping[WorkerId, WorkerRecord], now_s: float
) -> Iterator[WorkerMarked | WorkerQuarantined]:
    """Yield the penalties that workers have not received yet."""
    for name in sorted(blame.wrong | blame.marked):
        record, reason = workers.get(name), blame.reason
        if record is None or record.quarantine:
            continue
        if name in blame.wrong:
            yield WorkerQuarantined(worker_id=name, reason=f"{reason}, twice")
        elif record.marked_s >= blame.since_s:
            continue
        elif len(blame.marked) == 1 and record.marked_s and now_s - record.marked_s < MARK_S:
            again = f"{reason}, the second time in {MARK_S / 3600:g} hours"
            yield WorkerQuarantined(worker_id=name, reason=again)
        else:
            yield WorkerMarked(worker_id=name, reason=reason)
