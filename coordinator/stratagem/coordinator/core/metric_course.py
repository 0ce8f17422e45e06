"""The course of a metric over the evaluations of a run: a fold that says when training stops early.

What the fold has counted stands among the metrics of each commit, under names of its own. A run
that goes back to a commit counts on from there, and so does one that begins from it.
"""

from collections.abc import Mapping
from typing import Final

from stratagem.common.base.wording import counted
from stratagem.common.job import JobSpec
from stratagem.common.job.evaluation.followed_metric import FollowedMetric, stop_metric

STOP: Final = "stop."
_BEST: Final = "best"
_NUM_WITHOUT: Final = "evaluations_without_improvement"


def follows_evaluations(job: JobSpec) -> bool:
    """Return True when what is trained next depends on the newest evaluation."""
    return job.evaluation is not None and job.evaluation.stop is not None


def course_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what the fold has counted, of all metrics of a commit."""
    return {name: value for name, value in metrics.items() if name.startswith(STOP)}


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
    return {**metrics, **course}


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
    best = course.get(f"{prefix}{_BEST}")
    if _is_better(followed, value, best):
        return {f"{prefix}{_BEST}": value, f"{prefix}{_NUM_WITHOUT}": 0.0}
    return {f"{prefix}{_NUM_WITHOUT}": num_without + 1.0}


def _is_better(followed: FollowedMetric, value: float, best: float | None) -> bool:
    if best is None:
        return value == value
    if followed.mode == "max":
        return value > best + followed.min_delta
    return value < best - followed.min_delta
