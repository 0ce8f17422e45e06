"""The course of a metric over the evaluations of a run: a fold that says when training stops early,
and when a plateau lowers the learning rates.

What the fold has counted stands among the metrics of each commit, under names of its own. A run
that goes back to a commit counts on from there, and so does one that begins from it.
"""

import math
from collections.abc import Mapping
from typing import Final

from stratagem.common.base.text import counted
from stratagem.common.job import JobSpec, ScheduleSpec
from stratagem.common.job.fields import FollowedMetric, plateau_metric, stop_metric

STOP: Final = "stop."
PLATEAU: Final = "plateau."
_COOLDOWN: Final = f"{PLATEAU}evaluations_to_cool_down"
_REDUCTIONS: Final = f"{PLATEAU}lr_reductions"
_BEST: Final = "best"
_NUM_WITHOUT: Final = "evaluations_without_improvement"


def follows_evaluations(job: JobSpec) -> bool:
    """Return True when what is trained next depends on the newest evaluation."""
    has_stop = job.evaluation is not None and job.evaluation.stop is not None
    return has_stop or _plateau(job) is not None


def course_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what the fold has counted, of all metrics of a commit."""
    return {name: value for name, value in metrics.items() if name.startswith((STOP, PLATEAU))}


def resumed_metrics(job: JobSpec) -> Mapping[str, float]:
    """Return the metrics that a run goes on from which resumes a commit of another one."""
    initial = job.initial
    return {} if initial is None else dict(initial.metrics or {})


def with_course(
    job: JobSpec, before: Mapping[str, float], metrics: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a segment with what is counted after it.

    before: metrics of the segment before; in those of a segment without an evaluation it stands on.
    """
    course = course_of(before)
    evaluation = job.evaluation
    if evaluation is not None and evaluation.stop is not None:
        followed = stop_metric(evaluation, evaluation.stop)
        if followed.name in metrics:
            # Whoever goes on after a stop wants to: the count begins again.
            num_without = _num_without(course, STOP) % evaluation.stop.patience
            course |= _counted(course, STOP, followed, metrics[followed.name], num_without)
    plateau = _plateau(job)
    if evaluation is not None and plateau is not None:
        followed = plateau_metric(evaluation, plateau)
        if followed.name in metrics:
            course |= _lowered(course, plateau, followed, metrics[followed.name])
    return {**metrics, **course}


def num_lr_reductions(metrics: Mapping[str, float]) -> int:
    """Return how often the learning rates are lowered, after a segment with these metrics."""
    return int(metrics.get(_REDUCTIONS, 0))


def _plateau(job: JobSpec) -> ScheduleSpec | None:
    return None if job.optimizer is None else job.optimizer.plateau


def _lowered(
    course: Mapping[str, float], spec: ScheduleSpec, followed: FollowedMetric, value: float
) -> dict[str, float]:
    """Return the counts of a plateau after one more evaluation, as torch's ReduceLROnPlateau."""
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
    """Return why no further step is trained after a segment with these metrics, or ""."""
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
    """Return the best value and the evaluations since, after one more. NaN is no improvement."""
    sign = 1.0 if followed.mode == "max" else -1.0
    best = course.get(f"{prefix}{_BEST}", -sign * math.inf)
    if sign * value > sign * best + followed.min_delta:
        return {f"{prefix}{_BEST}": value, f"{prefix}{_NUM_WITHOUT}": 0.0}
    return {f"{prefix}{_NUM_WITHOUT}": num_without + 1.0}
