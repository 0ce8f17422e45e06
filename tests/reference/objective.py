"""What a job minimises, in the plainest form: a function of the model and one micro-batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from stratagem.common.job import JobSpec
from stratagem.worker.objectives.objective import Logged, LossValue, make_loss, weight_of
from stratagem.worker.user_code.entrypoints import EntryPoints

Objective = Callable[[nn.Module, Any, Any, int], LossValue]
"""(model, input, target, number of rows) -> mean loss, weight and what is logged."""


def objective_of(job: JobSpec, entrypoints: EntryPoints) -> Objective:
    """Forward pass and loss of a micro-batch."""
    if job.step is not None:
        return step_of(entrypoints.resolve(job.step))
    if job.loss.name == "model":
        return partial(_returned, job.loss.weight)
    loss = make_loss(job.loss, entrypoints)
    return lambda model, x, y, num_rows: loss(model(x), y, num_rows)


def step_of(step: Callable[..., Any]) -> Objective:
    """What a step function returns, as a mean, a weight, and what is logged."""

    def objective(model: nn.Module, x: Any, y: Any, num_rows: int) -> LossValue:
        found = step(model, _batch(x, y))
        if not isinstance(found, dict):
            mean, weight = found if isinstance(found, tuple) else (found, num_rows)
            return LossValue(mean, float(weight))
        log = []
        for name, value in sorted(found["log"].items()):
            logged, of = value if isinstance(value, tuple) else (value, num_rows)
            log.append(Logged(name, float(torch.as_tensor(logged).detach()), float(of)))
        return LossValue(found["loss"], float(found.get("weight", num_rows)), tuple(log))

    return objective


def prediction_of(
    job: JobSpec, entrypoints: EntryPoints
) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
    """(output, target) of a batch, for metrics."""
    if job.predict is not None:
        predict = entrypoints.resolve(job.predict)
        return lambda model, x, y: predict(model, _batch(x, y))
    if job.step is not None:
        return lambda model, x, y: (None, None)
    if job.loss.name == "model":
        return partial(_predicted, job.loss.weight)
    return lambda model, x, y: (model(x), y)


def _returned(weight: str | None, model: nn.Module, batch: Any, _: Any, num_rows: int) -> LossValue:
    """The model's own loss, a mean over rows or over the labels that are not -100; where there are
    none, a 0 that leads back to nothing."""
    labels = batch["labels"]
    counted = {
        "rows": num_rows,
        "labels": int((labels != -100).sum()),
        "shifted_labels": int((labels[..., 1:] != -100).sum()),
    }[weight or weight_of(model, labels)]
    found = model(**batch)
    mean = found["loss"] if isinstance(found, dict) else found.loss
    return LossValue(mean if counted else torch.zeros_like(mean).requires_grad_(), counted)


def _predicted(weight: str | None, model: nn.Module, batch: Any, _: Any) -> tuple[Any, Any]:
    labels = batch["labels"]
    if (weight or weight_of(model, labels)) == "shifted_labels":
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    return model(**batch).logits, labels


def _batch(x: Any, y: Any) -> Any:
    return x if isinstance(x, dict) and y is x else (x, y)
