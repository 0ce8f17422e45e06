"""Makes the objective that a job names: the one place that knows all kinds of them."""

from collections.abc import Callable
from typing import Any

from stratagem.common.job import JobSpec
from stratagem.common.job.fields import RETURNED
from stratagem.worker.engine.objectives.losses import counts_rows, make_loss
from stratagem.worker.engine.objectives.objective import Objective, OutputLoss
from stratagem.worker.engine.objectives.returned_loss import ReturnedLoss
from stratagem.worker.engine.objectives.step_function import StepFunction, TurnsObjective
from stratagem.worker.user_code.entrypoints import EntryPoints


def make_objective(job: JobSpec, entrypoints: EntryPoints) -> Objective:
    """Makes the objective that a job names."""
    if job.turns is not None:
        return TurnsObjective(step_functions(job, entrypoints))
    if job.step is None:
        if job.loss.name == RETURNED:
            return ReturnedLoss(job.loss.weight)
        return OutputLoss(make_loss(job.loss, entrypoints), counts_rows(job.loss))
    return StepFunction(entrypoints.resolve(job.step, "step"), _predict(job, entrypoints))


def step_functions(job: JobSpec, entrypoints: EntryPoints) -> list[StepFunction]:
    """Makes the objective of each turn of a job."""
    predict = _predict(job, entrypoints)
    return [
        StepFunction(entrypoints.resolve(turn.step, f"turns[{place}].step"), predict)
        for place, turn in enumerate(job.turns or ())
    ]


def _predict(job: JobSpec, entrypoints: EntryPoints) -> Callable[..., Any] | None:
    return None if job.predict is None else entrypoints.resolve(job.predict, "predict")
