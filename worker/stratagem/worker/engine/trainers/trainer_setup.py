"""The parts that every kind of trainer is built from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from stratagem.common.job import JobSpec
from stratagem.worker.data.datasets import Dataset, Gather
from stratagem.worker.data.order.sampler import BatchOrder, EpochRows, StreamOrder
from stratagem.worker.data.stream_dataset import StreamDataset
from stratagem.worker.engine.numerics.keyed_randomness import KeyedRandomness
from stratagem.worker.engine.numerics.prepare_model import ModelExecution
from stratagem.worker.engine.objectives.evaluator import Evaluator
from stratagem.worker.engine.objectives.objective import Objective
from stratagem.worker.engine.optim.turn_parameters import make_optimizer_of
from stratagem.worker.engine.step.callbacks import NO_CALLBACKS, Callbacks
from stratagem.worker.user_code.entrypoints import EntryPoints


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts of one trainer: job, model, data, objective, evaluator, randomness, execution."""

    job: JobSpec
    model: nn.Module
    data: Mapping[str, Dataset]
    objective: Objective
    gather: Gather
    evaluator: Evaluator
    randomness: KeyedRandomness
    execution: ModelExecution
    numerics: int
    """Version of the rules that decide the bits; see stratagem.common.numerics.rules."""
    entrypoints: EntryPoints
    epoch_rows: EpochRows | None = None
    """The order of the training rows; they are shuffled unless set."""
    callbacks: Callbacks = NO_CALLBACKS
    conversion: str = ""
    """A sentence about tensors whose dtype the job's precision has changed; "" for none."""

    def optimizer_of(self, params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """A fresh optimizer of these parameters, as the job says."""
        return make_optimizer_of(self.job, list(params), self.entrypoints)

    def batch_order(self) -> BatchOrder | StreamOrder:
        """Makes the order of the training batches."""
        train = self.data["train"]
        if isinstance(train, StreamDataset):
            return StreamOrder(self.job.batch_size)
        return BatchOrder(len(train), self.job.batch_size, self.job.seed, self.epoch_rows)

    @property
    def num_rows(self) -> dict[str, int]:
        """Rows per split; 0 of a stream, whose rows are not known before they are read."""
        return {split: len(dataset) for split, dataset in self.data.items()}

    @property
    def notes(self) -> list[str]:
        """Sentences about settings that are carried out in another way than they say."""
        return self.execution.notes
