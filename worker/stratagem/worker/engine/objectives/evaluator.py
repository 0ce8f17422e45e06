"""Evaluates a model on a split: fixed batches in order, dealt to the members by number.

Returns sums per batch, not means, so that their sum in order of batch does not depend on which
member evaluated which batch. Must not know the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stratagem.worker.data.datasets import Dataset, Gather
from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness
from stratagem.worker.engine.objectives.evaluation_metrics import Metric
from stratagem.worker.engine.objectives.losses import LossFunction
from stratagem.worker.user_code.entrypoints import user_code


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """Sums over one batch: "loss" and each metric, as mean × weight.

    A metric whose own weight differs from `weight` (it counts tokens where the loss counts rows)
    brings that weight along as "weight:<name>".
    """

    split: str
    batch: int
    weight: float
    sums: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates batches of a model; holds what stays the same from one evaluation to the next."""

    model: nn.Module
    randomness: KeyedRandomness
    gather: Gather
    loss: LossFunction
    metrics: Mapping[str, Metric]
    batch_size: int

    @torch.no_grad()
    def parts(self, split: str, dataset: Dataset, rank: int, size: int) -> list[EvaluationPart]:
        """Evaluates the batches whose number is congruent to rank modulo size."""
        self.model.eval()
        num_batches = -(-len(dataset) // self.batch_size)
        return [self.part(split, dataset, batch) for batch in range(rank, num_batches, size)]

    def part(
        self,
        split: str,
        dataset: Dataset,
        batch: int,
        keep: Callable[[Any, int], None] | None = None,
    ) -> EvaluationPart:
        """Evaluates one batch, with the model in its present mode (train or eval).

        keep: gets the output and the number of rows.
        """
        x, y, num_rows = self.begin_batch(split, dataset, batch)
        with user_code(f"evaluating {split}"):
            output = self.model(x)
        part = self.measure(split, batch, output, y, num_rows)
        if keep is not None:
            keep(output, num_rows)
        self.randomness.end()
        return part

    def begin_batch(self, split: str, dataset: Dataset, batch: int) -> tuple[Any, Any, int]:
        """(x, y, number of rows) of a batch; what is drawn from now on is drawn for it."""
        start = batch * self.batch_size
        indices = torch.arange(start, min(start + self.batch_size, len(dataset)))
        self.randomness.begin("evaluate", split, batch)
        return *self.gather(dataset, indices, f"evaluating {split}"), len(indices)

    def measure(self, split: str, batch: int, output: Any, y: Any, num_rows: int) -> EvaluationPart:
        """Computes loss and metrics of a batch from the model's output."""
        with user_code(f"evaluating {split}"):
            loss = self.loss(output, y, num_rows)
            sums = {"loss": float(loss.mean) * loss.weight}
            for name, metric in self.metrics.items():
                mean, weight = metric(output, y, num_rows)
                sums[name] = mean * weight
                if weight != loss.weight:
                    sums[f"weight:{name}"] = weight
        if loss.weight == 0:  # nothing was counted, so its mean may be anything
            sums["loss"] = 0.0
        return EvaluationPart(split, batch, loss.weight, sums)
