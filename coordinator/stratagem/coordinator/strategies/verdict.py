"""Decide who is wrong when a segment that was executed again ends with another state.

The second execution differs, so a third decides by majority. After it, each worker that is
suspected executes the segment alone: whoever computes other bits again is wrong for good, and a
fault that does not recur leaves a mark. All this is a pure function of the executions' digests.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from stratagem.common.base.ids import Digest, WorkerId
from stratagem.common.numerics.verification import Conclusion, conclude
from stratagem.coordinator.core.effects import Base
from stratagem.coordinator.core.facts import WorkerMarked, WorkerQuarantined
from stratagem.coordinator.core.world import WorkerRecord

MARK_S: Final = 24 * 3600.0
"""Seconds for which a mark counts: a worker that is then the only suspect is quarantined."""

Workers = frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class Point:
    """A state that the run has committed, and the workers that computed it from the one before."""

    base: Base
    metrics: Mapping[str, float] = field(default_factory=dict)
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
        """Return who is wrong; None while that is not decided.

        A third execution by the run's own workers does not confirm the run: what a defect repeats,
        it would repeat there.
        """
        if len(self.executions) < 2:
            return Conclusion.OPEN if self.is_given_up else None
        point, (second, third) = self.points[0], self.executions[:2]
        conclusion = conclude(point.base.digest, second.digest, third.digest)
        is_own = bool(third.workers & point.workers) and not third.workers & second.workers
        return Conclusion.OPEN if conclusion is Conclusion.VERIFIER and is_own else conclusion

    @property
    def right(self) -> Digest:
        """Return the digest of the majority of three executions, if there is one."""
        is_run_wrong = self.conclusion is Conclusion.RUN
        return self.executions[0].digest if is_run_wrong else self.points[0].base.digest

    @property
    def suspects(self) -> Workers:
        """Return the workers among which somebody was wrong; none while that is not decided."""
        match self.conclusion:
            case Conclusion.RUN:
                return self.points[0].workers
            case Conclusion.VERIFIER:
                return self.executions[0].workers
            case Conclusion.OPEN:
                return self.points[0].workers | self.executions[0].workers
            case _:
                return frozenset()

    @property
    def unprobed(self) -> tuple[WorkerId, ...]:
        """Return the suspects that have yet to execute the segment alone, sorted; none if there is
        no majority to compare them with."""
        if self.is_given_up or self.conclusion not in (Conclusion.RUN, Conclusion.VERIFIER):
            return ()
        return tuple(sorted(self.suspects - self._with(is_right=True) - self.wrong))

    @property
    def wrong(self) -> Workers:
        """Return the suspects that have computed other bits when they executed the segment alone,
        after the three executions."""
        return self.suspects & self._with(is_right=False)

    @property
    def are_cleared(self) -> bool:
        """Return True if all suspects have computed the right bits alone."""
        return self.suspects <= self._with(is_right=True)

    def _with(self, *, is_right: bool) -> Workers:
        """Return the workers with an execution alone that was right, or a probe that was wrong."""
        executions = self.executions if is_right else self.executions[2:]
        alone = (execution for execution in executions if len(execution.workers) == 1)
        names = (one.workers for one in alone if (one.digest == self.right) is is_right)
        return frozenset[WorkerId]().union(*names)


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
