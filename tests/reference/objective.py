"""What a job minimises, in the plainest form: a function of the model and one micro-batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from stratagem.common.job import JobSpec
from stratagem.worker.engine.objectives.losses import LossValue, make_loss
from stratagem.worker.engine.objectives.returned_loss import weight_of
from stratagem.worker.user_code.entrypoints import EntryPoints

Objective = Callable[[nn.Module, Any, Any, int], LossValue]
"""(model, input, target, number of rows) -> mean loss, weight and what is logged."""


def objective_of(job: JobSpec, entrypoints: EntryPoints) -> Objective:
    """Forward pass and loss of a micro-batch."""
    if job.loss.name == "model":
        return partial(_returned, job.loss.weight)
    loss = make_loss(job.loss, entrypoints)
    return lambda model, x, y, num_rows: loss(model(x), y, num_rows)


def prediction_of(
    job: JobSpec, entrypoints: EntryPoints
) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
    """(output, target) of a batch, for metrics."""
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
