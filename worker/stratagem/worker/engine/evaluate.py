"""Evaluates a model on a split: fixed batches in order, dealt to the members by number.

Answers sums per batch, not means, so that whoever adds them in order of batch gets a result that
does not depend on who evaluated what. Must not know the exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from stratagem.worker.data.datasets import Dataset, Gather
from stratagem.worker.engine.randomness import KeyedRandomness
from stratagem.worker.entrypoints import user_code
from stratagem.worker.losses import LossFunction
from stratagem.worker.metrics import Metric


@dataclass(frozen=True, slots=True)
class Part:
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
    """What does not change from one evaluation to the next."""

    model: nn.Module
    randomness: KeyedRandomness
    gather: Gather
    loss: LossFunction
    metrics: Mapping[str, Metric]
    batch_size: int

    @torch.no_grad()
    def parts(self, split: str, dataset: Dataset, rank: int, size: int) -> list[Part]:
        """The parts of the batches whose number is congruent to rank modulo size."""
        self.model.eval()
        num_batches = -(-len(dataset) // self.batch_size)
        return [self._part(split, dataset, batch) for batch in range(rank, num_batches, size)]

    def _part(self, split: str, dataset: Dataset, batch: int) -> Part:
        start = batch * self.batch_size
        indices = torch.arange(start, min(start + self.batch_size, len(dataset)))
        activity = f"evaluating {split}"
        self.randomness.begin("evaluate", split, batch)
        x, y = self.gather(dataset, indices, activity)
        with user_code(activity):
            output = self.model(x)
            loss = self.loss(output, y, len(indices))
            sums = {"loss": float(loss.mean) * loss.weight}
            for name, metric in self.metrics.items():
                mean, weight = metric(output, y, len(indices))
                sums[name] = mean * weight
                if weight != loss.weight:
                    sums[f"weight:{name}"] = weight
        if loss.weight == 0:  # nothing was counted, so its mean may be anything
            sums["loss"] = 0.0
        self.randomness.end()
        return Part(split, batch, loss.weight, sums)
