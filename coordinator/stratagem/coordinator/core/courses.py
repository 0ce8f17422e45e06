"""Decide on early stopping and plateaus from the evaluations of a run, and detect crash loops and
decisions that the job does not determine.

The counters for a metric are stored among the metrics of each commit, under reserved names. A run
that returns to a commit, or begins from one, continues with its counters.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from signal import Signals
from typing import Final

from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec, ScheduleSpec
from stratagem.common.job.sections import FollowedMetric, plateau_metric, stop_metric
from stratagem.common.numerics.verification import Conclusion
from stratagem.coordinator.core.facts import (
    ClientsJoined,
    ClientStateLost,
    Evaluated,
    Fact,
    GenerationClosed,
    Member,
    Noted,
    ProcessDied,
    RoundClosed,
    RoundWaits,
    SegmentRefuted,
    UpdateRejected,
)

# ---- Chance ----


def needs_its_journal(fact: Fact) -> bool:
    """Return True if timing or machines have influenced a decision, in any party, so that the job
    alone does not determine the result."""
    match fact:
        case RoundClosed() | Noted() | GenerationClosed():
            return fact.by_policy
        case Evaluated():
            return bool(fact.without)
        case UpdateRejected():
            return not fact.cause.is_of_the_job
        case SegmentRefuted():
            return fact.conclusion in (Conclusion.JOB, Conclusion.OPEN)
        case _:
            return isinstance(fact, RoundWaits | ClientsJoined | ClientStateLost)


# ---- Early stopping and plateaus ----

STOP: Final = "stop."
PLATEAU: Final = "plateau."
_COOLDOWN: Final = f"{PLATEAU}evaluations_to_cool_down"
_REDUCTIONS: Final = f"{PLATEAU}lr_reductions"
_BEST: Final = "best"
_NUM_WITHOUT: Final = "evaluations_without_improvement"


def follows_evaluations(job: JobSpec) -> bool:
    """Return True if further training depends on evaluations (early stopping, plateaus)."""
    has_stop = job.evaluation is not None and job.evaluation.stop is not None
    return has_stop or _plateau(job) is not None


def course_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the counters of early stopping and plateaus from the metrics of a commit."""
    return {name: value for name, value in metrics.items() if name.startswith((STOP, PLATEAU))}


def resumed_metrics(job: JobSpec) -> Mapping[str, float]:
    """Return the metrics that a run begins with: those of the commit that it resumes, or none."""
    initial = job.initial
    return {} if initial is None else dict(initial.metrics or {})


def with_course(
    job: JobSpec, before: Mapping[str, float], metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a segment, with the counters of early stopping and plateaus updated.

    before: metrics of the previous segment; a segment without an evaluation keeps its counters.
    """
    course = course_of(before)
    evaluation = job.evaluation
    if evaluation is not None and evaluation.stop is not None:
        followed = stop_metric(evaluation, evaluation.stop)
        if followed.name in metrics:
            # A run that goes on after a stop is meant to, so the count begins again.
            num_without = _num_without(course, STOP) % evaluation.stop.patience
            course |= _counted(course, STOP, followed, metrics[followed.name], num_without)
    plateau = _plateau(job)
    if evaluation is not None and plateau is not None:
        followed = plateau_metric(evaluation, plateau)
        if followed.name in metrics:
            course |= _lowered(course, plateau, followed, metrics[followed.name])
    return {**metrics, **course}


def num_lr_reductions(metrics: Mapping[str, float]) -> int:
    """Return how often a plateau has lowered the learning rates, from the newest metrics."""
    return int(metrics.get(_REDUCTIONS, 0))


def _plateau(job: JobSpec) -> ScheduleSpec | None:
    return None if job.optimizer is None else job.optimizer.plateau


def _lowered(
    course: Mapping[str, float], spec: ScheduleSpec, followed: FollowedMetric, value: float
) -> dict[str, float]:
    """Return the plateau counters after one more evaluation, as in torch's ReduceLROnPlateau."""
    counts = _counted(course, PLATEAU, followed, value, _num_without(course, PLATEAU))
    to_cool_down = int(course.get(_COOLDOWN, 0))
    if to_cool_down:
        to_cool_down, counts[f"{PLATEAU}{_NUM_WITHOUT}"] = to_cool_down - 1, 0.0
    num_reductions = num_lr_reductions(course)
    if _num_without(counts, PLATEAU) > spec.num_tolerated:
        num_reductions, to_cool_down = num_reductions + 1, spec.cooldown or 0
        counts[f"{PLATEAU}{_NUM_WITHOUT}"] = 0.0
    return {**counts, _COOLDOWN: float(to_cool_down), _REDUCTIONS: float(num_reductions)}


def why_stopped(job: JobSpec, metrics: Mapping[str, float]) -> str:
    """Return why early stopping ends the training after these metrics; "" if it goes on."""
    evaluation = job.evaluation
    if evaluation is None or evaluation.stop is None:
        return ""
    num_without, spec = _num_without(metrics, STOP), evaluation.stop
    if num_without < spec.patience:
        return ""
    followed = stop_metric(evaluation, spec)
    text = f"{followed.name} has not improved"
    if spec.min_delta:
        text += f" by more than {spec.min_delta:g}"
    best = metrics.get(f"{STOP}{_BEST}")
    at_best = "" if best is None else f"; its best is {best:.6g}"
    return f"{text} in {counted(num_without, 'evaluation')}{at_best}"


def _num_without(metrics: Mapping[str, float], prefix: str) -> int:
    return int(metrics.get(f"{prefix}{_NUM_WITHOUT}", 0))


def _counted(
    course: Mapping[str, float],
    prefix: str,
    followed: FollowedMetric,
    value: float,
    num_without: int,
) -> dict[str, float]:
    """Return the best value, and the number of evaluations since the best one, after one more
    evaluation. NaN is not an improvement."""
    sign = 1.0 if followed.mode == "max" else -1.0
    best = course.get(f"{prefix}{_BEST}", -sign * math.inf)
    if sign * value > sign * best + followed.min_delta:
        return {f"{prefix}{_BEST}": value, f"{prefix}{_NUM_WITHOUT}": 0.0}
    return {f"{prefix}{_NUM_WITHOUT}": num_without + 1.0}


# ---- Crash loops ----
#
# These rules distinguish work that ends its own process from processes that others end. All
# strategies share them.
#
# Any process may be killed at any time, which is no fault of the job. The rules count how often
# the same work (a segment, a client's round, a build, an evaluation) loses a process without
# making progress:
#
# * A process that was stopped (by a signal that asks for it, a drain, its supervisor), or that did
#   other work, does not count: no ProcessDied is journaled for it.
# * Processes that were at the work together and end one after the other count as one death, so
#   killing all workers at once counts as one.
# * Work that comes further than ever before regains its whole budget.
# * OWN deaths are enough where the process ended by itself: it exited, or the processor refused
#   what it did. SIGKILL and an unobserved end can be caused by the operator, by the kernel when
#   memory is short, or by the job: for those the limit is UNEXPLAINED deaths over UNEXPLAINED_S,
#   which random kills do not reach while the work makes progress now and then.

OWN: Final = 3
UNEXPLAINED: Final = 10
UNEXPLAINED_S: Final = 30.0
FAULTS: Final = frozenset(
    {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP", "SIGPIPE", "SIGXFSZ"}
)
"""Signals that a process causes itself."""
REQUESTS: Final = frozenset(
    {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGPWR", "SIGXCPU", "SIGALRM"}
)
"""Signals that ask a process to end."""


@dataclass(frozen=True, slots=True)
class Deaths:
    """The worker processes that have died at one piece of work since it last made progress."""

    num_own: int = 0
    num_unexplained: int = 0
    furthest: int = -1
    """The highest step that a process is known to have reached before it ended."""
    present: frozenset[Member] = frozenset()
    """The members at work at the newest counted death; if they die next, it is the same death."""
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
        """Return True if too many processes have died for the work to be tried again."""
        is_long = self.latest_s - self.since_s >= UNEXPLAINED_S
        return self.num_own >= OWN or (self.num >= UNEXPLAINED and is_long)


def after(deaths: Deaths, died: ProcessDied, now_s: float, at_work: Iterable[Member]) -> Deaths:
    """Return the deaths with one more process counted. at_work: the members that do the work now,
    or did until they were lost."""
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
    """Return True if the process itself caused this exit status (negative: number of a signal)."""
    return status is not None and (status > 0 or _signal(-status) in FAULTS)


def was_asked_to_end(status: int | None) -> bool:
    """Return True if a signal that asks processes to end, such as SIGTERM, ended the process."""
    return status is not None and status < 0 and _signal(-status) in REQUESTS


def why(work: str, deaths: Deaths) -> str:
    """Return a sentence that says that this work has ended too many worker processes."""
    text = f"{work} has ended {deaths.num} worker processes"
    if deaths.furthest >= 0:
        text += f" and came no further than step {deaths.furthest}"
    died = deaths.latest
    assert died is not None, "nobody asks of work that has ended none"
    text += f"; the last one, {died.member.worker_id}, ended{how(died.status) or ' unseen'}"
    return f"{text} and had printed: {' | '.join(died.lines)}" if died.lines else text


def how(status: int | None) -> str:
    """Return text on how a process ended, as " by SIGKILL" or " with exit status 3"; "" if that was
    not observed."""
    if status is None:
        return ""
    return f" by {_signal(-status)}" if status < 0 else f" with exit status {status}"


def _signal(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
