"""The section `evaluation.stop`, and the metrics whose course decides how a run goes on.

Checks itself; what a run then does is decided by the coordinator, from the evaluations that it has
journaled (`strategies/evaluation/metric_course.py` there).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from stratagem.common.base.errors import Violation
from stratagem.common.schema.document import Section
from stratagem.common.schema.field_types import Count, NotNegative
from stratagem.common.strategy import Custom, PopulationBased, Strategy

Mode: TypeAlias = Literal["max", "min"]


_EXAMPLE: Final = "evaluation: {best: loss, mode: min}"


class StopSpec(Section):
    """Ends the training early: after `patience` evaluations in a row without an improvement.

    metric and mode: those of evaluation.best unless set. min_delta: an improvement is a value that
    is better than the best one so far by more than this.
    """

    metric: str | None = None
    mode: Mode | None = None
    patience: Count
    min_delta: NotNegative = 0.0


class Plateau(Protocol):
    """What the section `optimizer.schedule` says of the metric that it follows."""

    @property
    def metric(self) -> str | None: ...
    @property
    def mode(self) -> Mode | None: ...
    @property
    def min_delta(self) -> float | None: ...


class Evaluation(Protocol):
    """What the section `evaluation` says of its metrics."""

    @property
    def split(self) -> str: ...
    @property
    def best(self) -> str | None: ...
    @property
    def mode(self) -> Mode: ...
    @property
    def stop(self) -> StopSpec | None: ...
    def why_not_measured(self, metric: str) -> str:
        """Return why no evaluation gives a value of this name; "" where it does."""


@dataclass(frozen=True, slots=True)
class FollowedMetric:
    """A metric by its name in a commit, and what counts as an improvement of it."""

    name: str
    mode: Mode
    min_delta: float


def stop_metric(evaluation: Evaluation, spec: StopSpec) -> FollowedMetric:
    """Return the metric that a stop follows, in a job that was checked."""
    return _followed(evaluation, spec.metric, spec.mode, spec.min_delta)


def plateau_metric(evaluation: Evaluation, spec: Plateau) -> FollowedMetric:
    """Return the metric that a plateau follows, in a job that was checked."""
    return _followed(evaluation, spec.metric, spec.mode, spec.min_delta or 0.0)


def check_followed(
    strategy: Strategy, evaluation: Evaluation | None, plateau: Plateau | None
) -> Iterator[Violation]:
    """Yield what is wrong with what a job has follow its evaluations."""
    stop = None if evaluation is None else evaluation.stop
    for path, spec in (("evaluation.stop", stop), ("optimizer.schedule", plateau)):
        if spec is None:
            continue
        yield from _why_not_followed(strategy, path)
        if evaluation is None:
            yield Violation(
                "evaluation", f"missing; {path} follows evaluations, for example {_EXAMPLE}"
            )
        else:
            yield from _metric_and_mode(evaluation, path, spec.metric, spec.mode)


def _why_not_followed(strategy: Strategy, path: str) -> Iterator[Violation]:
    match strategy:
        case PopulationBased():
            text = (
                "is not allowed with strategy PopulationBased, whose members copy each other's "
                "states; leave it out"
            )
            yield Violation(path, text)
        case Custom():
            text = "is not allowed with strategy Custom, which decides itself when a run ends"
            yield Violation(path, text)


def _metric_and_mode(
    evaluation: Evaluation, path: str, metric: str | None, mode: Mode | None
) -> Iterator[Violation]:
    if metric is None:
        if evaluation.best is None:
            yield Violation(
                f"{path}.metric",
                "missing; evaluation.best, its default, is not set, for example metric: loss",
            )
        return
    if problem := evaluation.why_not_measured(metric):
        yield Violation(f"{path}.metric", problem)
    elif mode is None and metric != evaluation.best:
        yield Violation(f"{path}.mode", f"missing; max or min, as {metric!r} is to rise or to fall")


def _followed(
    evaluation: Evaluation, metric: str | None, mode: Mode | None, min_delta: float
) -> FollowedMetric:
    name = metric or evaluation.best
    assert name is not None  # the job was checked
    return FollowedMetric(f"{evaluation.split}.{name}", mode or evaluation.mode, min_delta)
