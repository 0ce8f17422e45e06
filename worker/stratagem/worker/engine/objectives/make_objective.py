"""Makes the objective that a job names: the one place that knows all kinds of them."""

from stratagem.common.job import JobSpec
from stratagem.common.job.objective.built_in_names import RETURNED
from stratagem.worker.engine.objectives.losses import counts_rows, make_loss
from stratagem.worker.engine.objectives.objective import Objective, OutputLoss
from stratagem.worker.engine.objectives.returned_loss import ReturnedLoss
from stratagem.worker.engine.objectives.step_function import StepFunction
from stratagem.worker.user_code.entrypoints import EntryPoints


def make_objective(job: JobSpec, entrypoints: EntryPoints) -> Objective:
    """Makes the objective that a job names."""
    if job.step is None:
        if job.loss.name == RETURNED:
            return ReturnedLoss(job.loss.weight)
        return OutputLoss(make_loss(job.loss, entrypoints), counts_rows(job.loss))
    predict = None if job.predict is None else entrypoints.resolve(job.predict, "predict")
    return StepFunction(entrypoints.resolve(job.step, "step"), predict)
