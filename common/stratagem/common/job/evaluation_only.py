"""The job that trains nothing: `execution.gradient: None`.

It evaluates one state, once, on all rows of one split. Says which fields such a job has, and why
the others have no place in it.
"""

from typing import TYPE_CHECKING, Final

from stratagem.common.base.errors import Violation
from stratagem.common.job.execution_section import ModelParallel, PipelineParallel
from stratagem.common.job.interval import Every
from stratagem.common.strategy import DIRECT_ALL_REDUCE, AllReduce, DataParallel, Local
from stratagem.common.strategy import ModelParallel as Stages

if TYPE_CHECKING:
    from stratagem.common.job.spec import JobSpec

_WHY: Final = "execution.gradient is None, so nothing is trained"
_EXAMPLE: Final = "evaluation: {split: test}"
_OF_TRAINING: Final = {
    "optimizer": "there is nothing to update",
    "weight_average": "there are no updates to average over",
    "epochs": "each row is evaluated once",
    "steps": "each row is evaluated once",
    "accumulation": "there are no gradients to add up",
    "compression": "there are no gradients to code",
    "phases": "there are no gradients to predict",
    "privacy": "there are no clients to protect",
    "partition": "there are no clients to divide the rows among",
    "search_space": "there is nothing to tune",
    "steps_per_generation": "there are no steps",
    "hyperparameter_schedule": "there are no steps",
}


def check_evaluating(job: "JobSpec") -> list[Violation]:
    """Return what a job without gradients says that belongs to training, and what it lacks."""
    violations = [
        Violation(name, f"{_WHY}: {reason}; leave it out")
        for name, reason in _OF_TRAINING.items()
        if getattr(job, name) is not None
    ]
    if job.initial is not None and job.initial.resume is not None:
        violations.append(
            Violation("initial.resume", f"{_WHY}: there are no steps to go on with; leave it out")
        )
    if job.checkpoint.every is not None:
        violations.append(
            Violation("checkpoint.every", f"{_WHY}: there is one state; leave it out")
        )
    return [*violations, *_evaluation(job), *_strategy(job)]


def _evaluation(job: "JobSpec") -> list[Violation]:
    own = job.evaluation
    if own is None:
        return [
            Violation(
                "evaluation",
                f"missing; {_WHY}, and it says what is evaluated, for example {_EXAMPLE}",
            )
        ]
    violations = []
    if own.best is not None:
        violations.append(Violation("evaluation.best", f"{_WHY}: there is one state; leave it out"))
    if own.stop is not None:
        violations.append(Violation("evaluation.stop", f"{_WHY}: there is one state; leave it out"))
    if own.of == "average":
        text = f"{_WHY}: there is no average; begin from the file of one, as initial.file"
        violations.append(Violation("evaluation.of", text))
    if own.every != Every(1, "epoch"):
        text = f"{_WHY}: it is evaluated once; leave it out"
        violations.append(Violation("evaluation.every", text))
    if "batch_size" in job.model_fields_set and job.batch_size != own.batch_size:
        text = f"is {job.batch_size}, and evaluation.batch_size {own.batch_size}; leave one out"
        violations.append(Violation("batch_size", text))
    return violations


def _strategy(job: "JobSpec") -> list[Violation]:
    asked = job.execution.parallelism
    if isinstance(asked, ModelParallel | PipelineParallel):
        text = (
            f"{type(asked).__name__} cuts a model by what training costs; {_WHY}. Say strategy: "
            "ModelParallel with partitions, or DataParallel, which divides rows"
        )
        return [Violation("execution.parallelism", text)]
    match job.strategy:
        case Local():
            return []
        case DataParallel(aggregation=AllReduce(), options=options):
            violations = []
            if not isinstance(options.inner, Local | None):
                text = f"{_WHY}: a replica is one worker; leave it out"
                violations.append(Violation("strategy.options.inner", text))
            if options.all_reduce != DIRECT_ALL_REDUCE:
                text = f"{_WHY}: there is nothing to add up; leave it out"
                violations.append(Violation("strategy.options.all_reduce", text))
            return violations
        case Stages():
            if job.evaluation is None or not job.evaluation.predictions:
                return []
            text = "is not possible under ModelParallel: outputs are with the last stage alone"
            return [Violation("evaluation.predictions", text)]
        case DataParallel():
            text = f"{_WHY}: there is nothing to aggregate; AllReduce stands for plain replicas"
            return [Violation("strategy.aggregation.method", text)]
        case other:
            kinds = "Local, DataParallel and ModelParallel evaluate"
            text = f"{type(other).__name__} trains, and {_WHY}; {kinds}"
            return [Violation("strategy.type", text)]
