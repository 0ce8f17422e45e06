"""The objective of a job: one of `loss` and `step`, and what goes with it.

`step` names a function of (model, batch) that computes the loss itself; `predict` one that returns
(output, target) for metrics. Neither can be cut into stages.
"""

from collections.abc import Iterator
from typing import Any, Final, Protocol

from stratagem.common.base.errors import Violation
from stratagem.common.job.objective.built_in_names import FROM_LOSS, LOSSES, RETURNED
from stratagem.common.strategy import Strategy, is_cut

_NO_LOSS: Final = (
    "missing; a job has a loss, or a step that computes one, or turns; one of "
    f"{', '.join(sorted(LOSSES))}, for example loss: cross_entropy"
)


class Job(Protocol):
    """What is asked of a job here."""

    @property
    def model(self) -> Any: ...
    @property
    def loss(self) -> Any: ...
    @property
    def step(self) -> str | None: ...
    @property
    def turns(self) -> Any: ...
    @property
    def predict(self) -> str | None: ...
    @property
    def evaluation(self) -> Any: ...
    @property
    def strategy(self) -> Strategy: ...


def check_objective(job: Job) -> Iterator[Violation]:
    """Yield what is wrong with the objective of a job."""
    if job.turns is not None:
        yield from _metrics(job)
        return
    if job.loss is None and job.step is None:
        yield Violation("loss", _NO_LOSS)
        return
    if job.loss is not None and job.step is not None:
        yield Violation("step", "loss is set already; only one of the two may be")
    if job.step is None:
        if job.predict is not None:
            yield Violation(
                "predict", "goes with step or turns; a loss is of the model's output already"
            )
        yield from _returned_loss(job)
        return
    if is_cut(job.strategy):
        text = "a function of the whole model has no place in stages, as ModelParallel cuts them"
        yield Violation("step", f"is not allowed with strategy ModelParallel: {text}")
    yield from _metrics(job)


def _metrics(job: Job) -> Iterator[Violation]:
    own = job.evaluation
    if own is None or job.predict is not None:
        return
    text = "needs predict, a function (model, batch) -> (output, target)"
    for place, name in enumerate(own.metrics):
        if name not in FROM_LOSS:
            yield Violation(f"evaluation.metrics[{place}]", f"{name!r} {text}")
    if own.predictions:
        yield Violation("evaluation.predictions", text)


def _returned_loss(job: Job) -> Iterator[Violation]:
    if job.loss.name != RETURNED:
        return
    if is_cut(job.strategy):
        text = (
            "model is not allowed with strategy ModelParallel: a stage cannot call model(**batch)"
        )
        yield Violation("loss", f"{text}; name a loss of the last stage's output")
    if job.model.graph is not None:
        text = "model is not allowed with model.graph, which returns outputs and no loss"
        yield Violation("loss", text)
