"""What a job minimises, in the plainest form: a function of the model and one micro-batch."""

from collections.abc import Callable
from typing import Any

from torch import nn

from stratagem.common.job import JobSpec
from stratagem.worker.engine.objectives.losses import LossValue, make_loss
from stratagem.worker.user_code.entrypoints import EntryPoints

Objective = Callable[[nn.Module, Any, Any, int], LossValue]
"""(model, input, target, number of rows) -> mean loss, weight and what is logged."""


def objective_of(job: JobSpec, entrypoints: EntryPoints) -> Objective:
    """Forward pass and loss of a micro-batch."""
    loss = make_loss(job.loss, entrypoints)
    return lambda model, x, y, num_rows: loss(model(x), y, num_rows)


def prediction_of(
    job: JobSpec, entrypoints: EntryPoints
) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
    """(output, target) of a batch, for metrics."""
    return lambda model, x, y: (model(x), y)
