"""Objectives: what a model is trained for, as (mean loss, weight, log) of one micro-batch.

An objective calls the model itself, so it may be a loss of the model's output, or any function of
model and batch. Everything that trains or evaluates a whole model knows objectives only; a
pipeline, whose model is in stages, needs the loss of an output. Must not know shards.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from stratagem.worker.engine.objectives.losses import (
    Assessment,
    LossFunction,
    LossValue,
    NamedLoss,
)
from stratagem.worker.user_code.call_notes import noted


class Objective(Protocol):
    """What a model is trained for. num_rows: of the micro-batch, as the plan asked for."""

    @property
    def is_users(self) -> bool:
        """True if code of the user's runs in it, which may draw from any generator."""

    @property
    def counts_rows(self) -> bool:
        """True if the weight is always the number of rows, so that it is known beforehand."""

    @property
    def may_log(self) -> bool:
        """True if there may be numbers to log beside the loss."""

    def __call__(self, model: nn.Module, x: Any, y: Any, num_rows: int) -> LossValue:
        """Computes the forward pass and the loss of a micro-batch; the caller goes backward."""

    def evaluate(
        self, model: nn.Module, x: Any, y: Any, num_rows: int, *, wants_output: bool
    ) -> Assessment:
        """Computes the loss of a batch, without a gradient. wants_output: else output and target
        may be left out."""


@dataclass(frozen=True, slots=True)
class OutputLoss:
    """The objective of a job with a `loss`: that of the model's output and the target."""

    loss: LossFunction
    counts_rows: bool
    may_log: bool = field(default=False, init=False)

    @property
    def is_users(self) -> bool:
        """True for a loss by entry point."""
        return not isinstance(self.loss, NamedLoss)

    def __call__(self, model: nn.Module, x: Any, y: Any, num_rows: int) -> LossValue:
        """An `Objective`."""
        with noted(model, x):
            output = model(x)
        return self.loss(output, y, num_rows)

    def evaluate(
        self, model: nn.Module, x: Any, y: Any, num_rows: int, *, wants_output: bool
    ) -> Assessment:
        """Computes output and loss of a batch."""
        with noted(model, x):
            output = model(x)
        return Assessment(self.loss(output, y, num_rows), output, y)
